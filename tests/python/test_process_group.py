"""A process that destroys its process group and makes another, as elastic trainers and notebooks do."""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

import dmuon


def train(mesh, rank: int) -> nn.Module:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    dmuon.dedicate_params(model, mesh, lambda n, p: True)
    optimizer = dmuon.Muon(model)
    for _ in range(2):
        model(torch.full((2, 8), 1.0 + rank)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def run(rank: int, ports: list[int]) -> None:
    models = []
    for port in ports:
        dist.init_process_group("gloo", init_method=f"tcp://localhost:{port}", rank=rank, world_size=2)
        for old in models:  # its group's name may have been taken by the new one
            try:
                old(torch.ones(1, 8))
            except RuntimeError as error:
                assert "has been destroyed" in str(error)
            else:
                raise AssertionError("a model of a destroyed process group ran")
        models.append(train(init_device_mesh("cpu", (2,)), rank))
        dist.barrier()
        dist.destroy_process_group()
    os._exit(0)  # gloo's threads may outlive the interpreter (pytorch issue 190489)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def test_init_process_group_again():
    mp.spawn(run, ([free_port(), free_port()],), nprocs=2)
