"""HSDP against one process and against shard-only: same losses, same weights, same bytes as the formulas.

torchrun --nproc_per_node=4 tests/distributed/test_hsdp_correctness.py
"""

import sys

import pytest
import torch
import torch.distributed as dist
from reference import TinyModel, batch, loss_of
from setup import Setup, align, assert_same, check_invariants, full_values, step_both, update_tolerance

import dmuon

pytestmark = pytest.mark.ranks(2, 4)

STEPS = 20


def small() -> TinyModel:
    return TinyModel(dim=16, hidden=24, layers=3)


@pytest.mark.parametrize("z3", [True, False], ids=["z3", "z2"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_equals_one_process(mesh_2d, rank, world_size, z3, dtype):
    setup = Setup(z3=z3, dtype=dtype, make=small, recipe="b")
    model, optimizer, reference = setup.build(mesh_2d)
    check_invariants(model)
    for step in range(STEPS):
        compared = step < 3 or step % 5 == 4  # comparing is what takes the time
        loss = loss_of(model, batch(step, rank))
        loss.backward()
        losses = [loss_of(reference, batch(step, r)) for r in range(world_size)]
        torch.testing.assert_close(loss.detach().cpu(), losses[rank].detach().cpu(), rtol=1e-5, atol=1e-6)
        reference.backward(losses, world_size)
        if compared:
            check_invariants(model)
            assert_same(model, reference, 1e-6 if dtype else 1e-5, grads=True)
        optimizer.step()
        reference.step()
        if compared:
            check_invariants(model)
            assert_same(model, reference, update_tolerance(mesh_2d, 1e-6 if step < 5 or dtype else 3e-6))
        optimizer.zero_grad()
        reference.zero_grad()
        if dtype is not None or mesh_2d.device_type != "cpu":
            align(model, reference)


def run(setup: Setup, mesh, rank: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, optimizer, _ = setup.build(mesh)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, batch(step, rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    align(model, reference := setup.build(mesh)[2])
    return losses, {name: p.detach().clone() for name, p in reference.model.named_parameters()}


@pytest.mark.parametrize("z3", [True, False], ids=["z3", "z2"])
def test_equals_shard_only(mesh, mesh_2d, rank, z3):
    """Within fp32 rounding: the sums over ranks are made in another order."""
    setup = Setup(z3=z3, make=small, recipe="b")
    losses, weights = run(setup, mesh_2d, rank)
    expected_losses, expected = run(setup, mesh, rank)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected_losses), rtol=1e-5, atol=1e-6)
    for name, value in weights.items():
        assert ((value - expected[name]).norm() / expected[name].norm()).item() < 5e-6, name


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_bytes_per_stage(mesh_2d, rank, dtype):
    """Per step: gathers and stage 1 inside the shard group, stage 2 and publish of one column across replicas."""
    model, optimizer, _ = Setup(dtype=dtype, make=lambda: TinyModel(dim=32, hidden=64, layers=4)).build(mesh_2d)
    dmuon.comm_stats(model, reset=True)
    steps = 2
    for step in range(steps):
        loss_of(model, batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    stats = dmuon.comm_stats(model)
    replicas, shards = mesh_2d.shape
    elements = sum(p.parameter.numel() for p in dmuon.get_dedicated_params(model))
    compute = 2 if dtype else 4
    assert total(stats.broadcast_bytes) == steps * 2 * replicas * (shards - 1) * elements * compute
    assert total(stats.reduce_bytes) == steps * replicas * (shards - 1) * elements * 4
    assert total(stats.publish_bytes) == steps * (replicas - 1) * elements * compute
    assert total(stats.replicate_reduce_bytes) == steps * (replicas - 1) * elements * 4


def total(value: int) -> int:
    tensor = torch.tensor(value)
    dist.all_reduce(tensor)
    return int(tensor)


def test_all_reduce_on_the_last_micro_batch_only(mesh_2d, rank, world_size):
    model, optimizer, reference = Setup(make=small).build(mesh_2d)
    for step in range(3):
        dmuon.comm_stats(model, reset=True)
        model.set_requires_all_reduce(False)
        for i in range(2):
            loss_of(model, batch(10 * step + i, rank)).backward()
        assert dmuon.comm_stats(model).replicate_reduce_calls == 0
        assert all(param._reduced_grad is None for param in dmuon.get_dedicated_params(model))
        model.set_requires_all_reduce(True)
        loss_of(model, batch(10 * step + 2, rank)).backward()
        for i in range(3):
            reference.backward([loss_of(reference, batch(10 * step + i, r)) for r in range(world_size)], world_size)
        step_both(mesh_2d, model, optimizer, reference)


def test_peak_memory_is_what_the_plan_predicts(mesh_2d, rank):
    model, optimizer, _ = Setup(dtype=torch.bfloat16, make=lambda: TinyModel(dim=32, hidden=64, layers=4)).build(
        mesh_2d
    )
    for step in range(2):
        dmuon.memory_report(model, track=True)
        loss_of(model, batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    report = dmuon.memory_report(model)
    predicted = max(report.predicted_forward_peak, report.predicted_backward_peak)
    assert report.live + report.predicted_momentum == report.predicted_resident
    assert abs(report.peak + report.predicted_momentum - predicted) <= 0.02 * predicted, f"{report}"


def test_initial_values_are_those_of_the_first_rank(mesh_2d, rank):
    torch.manual_seed(100 + rank)
    setup = Setup(make=small)
    model = small()
    expected = [p.detach().clone() for p in model.parameters()]
    for value in expected:
        dist.broadcast(value, src=0)
    setup.wrap(model, mesh_2d)
    check_invariants(model)
    names = [name for name, _ in small().named_parameters()]
    values = full_values(model)
    for name, value in zip(names, expected, strict=True):
        if name in values:
            assert torch.equal(values[name].cpu(), value), name


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
