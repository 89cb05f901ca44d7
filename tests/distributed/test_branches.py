"""Ranks that go different ways, or fail: a dedicated model without FSDP2, whose collectives must match on all ranks."""

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from setup import check_invariants

import dmuon


class Branching(nn.Module):
    """Experts behind the caller's choice; gradients of unused ones must be zero or absent, never stale."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(12, 12, bias=False) for _ in range(5)])

    def forward(self, x, chosen):
        for index in chosen:
            x = x + torch.tanh(self.layers[index](x))
        return x


class Chain(nn.Module):
    """Hands out what every layer made, for hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(6)])

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        outputs = [x]
        for layer in self.layers:
            outputs.append(layer(torch.tanh(outputs[-1])))
        return outputs


@pytest.mark.parametrize("late", ["first rank", "last rank"])
def test_gathers_offered_early_keep_off_the_meshs_group(mesh, rank, world_size, late):
    """A rank is late in backward, its peers offer gathers meanwhile; all have a collective of their own on the mesh's
    group in the middle, as FSDP2 has: the gathers must not take its place.
    """
    torch.manual_seed(0)
    model = Chain().to(mesh.device_type)
    dmuon.dedicate_params(model, mesh, lambda n, p: True)
    outputs = model(torch.ones(2, 8, device=mesh.device_type, requires_grad=True))
    summed = torch.full((8, 8), 1.0 + rank, device=mesh.device_type)
    works = []
    is_late = rank == (0 if late == "first rank" else world_size - 1)
    outputs[5].register_hook(lambda gradient: time.sleep(0.5) if is_late else None)
    outputs[3].register_hook(
        lambda gradient: works.append(dist.all_reduce(summed, group=mesh.get_group(), async_op=True))
    )
    outputs[-1].sum().backward()
    works[0].wait()
    assert torch.equal(summed.cpu(), torch.full((8, 8), world_size * (world_size + 1) / 2))


def choose(seed: int, step: int, rank: int) -> list[int]:
    """A random sequence of distinct experts: another set, in another order, on every rank and step; never empty."""
    generator = torch.Generator().manual_seed(7919 * seed + 101 * step + rank)
    count = int(torch.randint(1, 6, (1,), generator=generator))
    return torch.randperm(5, generator=generator)[:count].tolist()


@pytest.mark.parametrize("z3", [True, False], ids=["z3", "z2"])
@pytest.mark.parametrize("seed", range(6))
def test_ranks_take_different_branches(mesh, rank, world_size, z3, seed):
    """No hang; mean with zeros where some ranks used a matrix, None where nobody did."""
    check_branches(mesh, rank, world_size, seed, {"mesh": mesh, "reshard_after_forward": z3})


@pytest.mark.parametrize("z3", [True, False], ids=["z3", "z2"])
@pytest.mark.parametrize("seed", range(3))
def test_ranks_of_replicas_take_different_branches(hsdp_mesh, rank, world_size, z3, seed):
    axes = hsdp_mesh.axes
    options = {"mesh": axes["shard"], "replicate_mesh": axes["replicate"], "reshard_after_forward": z3}
    check_branches(hsdp_mesh, rank, world_size, 100 + seed, options)


def check_branches(mesh, rank: int, world_size: int, seed: int, options: dict) -> None:
    torch.manual_seed(0)
    model = Branching()
    weights = [layer.weight.detach().clone().to(mesh.device_type) for layer in model.layers]
    dmuon.dedicate_params(model, predicate=lambda n, p: True, **options)
    for step in range(5):
        for index, (layer, weight) in enumerate(zip(model.layers, weights, strict=True)):
            trained = step < 2 or (index + step + seed) % 3 > 0  # changes are agreed on, wherever the ranks are
            layer.weight.requires_grad_(trained), weight.requires_grad_(trained)
        x = [torch.randn(3, 12, generator=torch.Generator().manual_seed(100 * step + r)) for r in range(world_size)]
        x = [each.to(mesh.device_type).requires_grad_() for each in x]  # a rank may use frozen layers alone
        model(x[rank], choose(seed, step, rank)).pow(2).mean().backward()
        for r in range(world_size):
            y = x[r]
            for index in choose(seed, step, r):
                y = y + torch.tanh(y @ weights[index].T)
            y.pow(2).mean().backward()
        for param, weight in zip(dmuon.get_dedicated_params(model), weights, strict=True):
            if not param.is_owner:
                assert param._reduced_grad is None
            elif weight.grad is None:
                assert param._reduced_grad is None, f"{param.name}: nobody used it"
            else:
                torch.testing.assert_close(param._reduced_grad, weight.grad / world_size, rtol=1e-4, atol=1e-7)
            weight.grad = None
        model.zero_grad()


def test_zero_grad_drops_what_no_sync_kept_back(mesh, rank, world_size):
    """Without FSDP2, which keeps its own gradients back until a synchronising backward."""
    torch.manual_seed(0)
    model = Branching()
    weights = [layer.weight.detach().clone().requires_grad_() for layer in model.layers]
    dmuon.dedicate_params(model, mesh, lambda n, p: True)
    optimizer = dmuon.Muon(model)
    x = [torch.randn(3, 12, generator=torch.Generator().manual_seed(r)) for r in range(world_size)]
    with dmuon.no_sync(model):
        (float("nan") * model(x[rank].to(mesh.device_type), [0, 1, 2, 3, 4]).sum()).backward()
    optimizer.zero_grad()
    model(x[rank].to(mesh.device_type), [0, 1, 2, 3, 4]).pow(2).mean().backward()
    for r in range(world_size):
        y = x[r]
        for weight in weights:
            y = y + torch.tanh(y @ weight.T)
        y.pow(2).mean().backward()
    for param, weight in zip(dmuon.get_dedicated_params(model), weights, strict=True):
        if param.is_owner:
            torch.testing.assert_close(param._reduced_grad.cpu(), weight.grad / world_size, rtol=1e-4, atol=1e-7)


class Boom(torch.autograd.Function):
    """Fails where it is told to, as running out of memory would."""

    @staticmethod
    def forward(ctx, x, where):
        ctx.where = where
        if where == "forward":
            raise MemoryError("boom")
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise MemoryError("boom")


@pytest.mark.parametrize("z3", [True, False], ids=["z3", "z2"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_training_goes_on_after_an_exception(mesh, rank, world_size, z3, where):
    """Without FSDP2, which keeps a failed iteration's state."""
    torch.manual_seed(0)
    model = Branching()
    weights = [layer.weight.detach().clone().requires_grad_() for layer in model.layers]
    dmuon.dedicate_params(model, mesh, lambda n, p: True, reshard_after_forward=z3)
    order = [0, 1, 2, 3, 4]

    def loss(step: int, r: int, call: Callable) -> torch.Tensor:
        x = torch.randn(3, 12, generator=torch.Generator().manual_seed(100 * step + r))
        return call(x).pow(2).mean()

    def reference(x: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = x + torch.tanh(x @ weight.T)
        return x

    def on_device(x: torch.Tensor) -> torch.Tensor:
        return model(x.to(mesh.device_type), order)

    for step in range(3):
        handle = model.layers[2].register_forward_hook(lambda module, args, output: Boom.apply(output, where))
        with pytest.raises(MemoryError):
            loss(50 + step, rank, on_device).backward()
        handle.remove()
        params = dmuon.get_dedicated_params(model)
        assert all(p is param.parameter for p, param in zip(model.parameters(), params, strict=True))
        assert all(param._reduced_grad is None for param in params[:2])
        model.zero_grad()
        loss(step, rank, on_device).backward()
        for r in range(world_size):
            loss(step, r, reference).backward()
        for param, weight in zip(dmuon.get_dedicated_params(model), weights, strict=True):
            if param.is_owner:
                torch.testing.assert_close(param._reduced_grad, weight.grad / world_size, rtol=1e-4, atol=1e-7)
            weight.grad = None
        model.zero_grad()
        check_invariants(model)
