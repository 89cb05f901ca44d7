"""reproducible=True: the same bits on every mesh shape, and on one rank that accumulates the ranks' micro-batches."""

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from setup import global_rank, mesh_of
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import dmuon

STEPS = 4


class Matrices(nn.Module):
    """Only dedicated matrices: FSDP2's own sums are not reproducible across meshes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(20, 20, bias=False) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def loss_of(model: nn.Module, step: int, index: int, device: str) -> torch.Tensor:
    x = torch.randn(3, 20, generator=torch.Generator().manual_seed(100 * step + index))
    return model(x.to(device)).pow(2).mean()


def train(mesh: DeviceMesh, indices: list[int], world_size: int) -> list[torch.Tensor]:
    """This rank trains on the micro-batches `indices`; returns all masters after STEPS steps."""
    torch.manual_seed(0)
    model = Matrices()
    hsdp = mesh.ndim == 2
    dmuon.dedicate_params(
        model,
        mesh["shard"] if hsdp else mesh,
        lambda n, p: True,
        replicate_mesh=mesh["replicate"] if hsdp else None,
        reproducible=True,
    )
    optimizer = dmuon.Muon(model, lr=0.01)
    for step in range(STEPS):
        for index in indices:
            (loss_of(model, step, index, mesh.device_type) / len(indices)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [value_of(param, model, solo=len(indices) == world_size) for param in dmuon.get_dedicated_params(model)]


def value_of(param: dmuon.DedicatedParam, model: nn.Module, solo: bool) -> torch.Tensor:
    value = torch.empty(20, 20, device=model._dmuon.unsharded[0].device)
    if param.is_owner:
        value.copy_(param.parameter.detach())
    if not solo:
        dist.broadcast(value, src=global_rank(mesh_of(model), param.owner_rank))
    return value


def test_bits_do_not_depend_on_the_mesh(mesh, mesh_2d, rank, world_size):
    if world_size & (world_size - 1):
        pytest.skip("dividing by a number of ranks that is not a power of two rounds")
    one_rank = init_device_mesh(mesh.device_type, (world_size, 1), mesh_dim_names=("all", "shard"))["shard"]
    expected = train(mesh, [rank], world_size)
    for ours, theirs in zip(train(mesh_2d, [rank], world_size), expected, strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(train(one_rank, list(range(world_size)), world_size), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_shard_group_must_be_a_power_of_two(mesh, world_size):
    if world_size != 6:
        pytest.skip("needs a 2x3 mesh")
    mesh_2x3 = init_device_mesh(mesh.device_type, (2, 3), mesh_dim_names=("replicate", "shard"))
    with pytest.raises(ValueError, match="power of two ranks, got 3"):
        train(mesh_2x3, [0], world_size)
