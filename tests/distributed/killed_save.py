"""A run that saves again and again until it is killed; test_checkpoint_kill.py forks its ranks from a process that has
imported this module.
"""

import os
from pathlib import Path

import torch
import torch._dynamo  # or every rank that is forked imports it, which takes a second
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

import dmuon


def build() -> tuple[nn.Module, dmuon.Muon]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    model = nn.Sequential(*[nn.Linear(96, 96, bias=False) for _ in range(6)])
    dmuon.dedicate_params(model, mesh, lambda name, p: True)
    return model, dmuon.Muon(model)


@torch.no_grad()
def set_all(model: nn.Module, optimizer: dmuon.Muon, step: int) -> None:
    """Every value of weights and momentum says which step it is of."""
    for p in model.parameters():
        if not p.is_meta:
            p.fill_(step)
            optimizer.state[p]["momentum_buffer"].fill_(step)


def run(rank: int, world_size: int, folder: str, kind: str) -> None:
    """`kind`: "torch" or "dmuon" saves a directory a step; "replace" one directory in all steps."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what the survivors say when a rank is gone
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    model, optimizer = build()
    for step in range(1, 1000):
        set_all(model, optimizer, step)
        path = Path(folder, "last" if kind == "replace" else f"{step:04d}")
        if kind == "torch":
            dcp.save(dmuon.get_state_dict(model, optimizer), checkpoint_id=path)
        else:
            dmuon.save_checkpoint(path, model, optimizer, overwrite=kind == "replace")
        if rank == 0:
            Path(folder, "saved.new").write_text(str(step))
            os.rename(Path(folder, "saved.new"), Path(folder, "saved"))
