"""What goes over the wire and what stays in memory: the formulas, exactly."""

import threading
import time

import pytest
import torch
import torch.distributed as dist
from reference import TinyModel, batch, is_matrix, loss_of
from setup import Setup

import dmuon

LAYERS = 4


def make_model() -> TinyModel:
    """All sizes are multiples of 16 bytes, so there is no padding on the wire; several owners share each layer."""
    return TinyModel(dim=32, hidden=64, layers=LAYERS)


def train_step(model, optimizer, rank: int) -> None:
    loss_of(model, batch(7, rank)).backward()
    optimizer.step()
    optimizer.zero_grad()


def total(value: int) -> int:
    tensor = torch.tensor(value)
    dist.all_reduce(tensor)
    return int(tensor)


@pytest.mark.parametrize("z3", [True, False], ids=["z3", "z2"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_bytes_equal_the_formulas_and_calls_are_grouped(mesh, rank, world_size, z3, dtype):
    setup = Setup(z3=z3, dtype=dtype, make=make_model)
    model, optimizer, _ = setup.build(mesh)
    dmuon.comm_stats(model, reset=True)
    steps = 3
    for _ in range(steps):
        train_step(model, optimizer, rank)
    stats = dmuon.comm_stats(model)
    elements = sum(param.parameter.numel() for param in dmuon.get_dedicated_params(model))
    compute_bytes = 2 if dtype else 4
    gathers = 2 if z3 else 1
    assert total(stats.broadcast_bytes) == steps * gathers * (world_size - 1) * elements * compute_bytes
    sent_bytes = compute_bytes if model._dmuon.comms[1].copies_from_peers() else 4
    assert total(stats.reduce_bytes) == steps * (world_size - 1) * elements * sent_bytes
    if world_size > 1:
        assert stats.broadcast_calls == steps * gathers * LAYERS
        assert stats.reduce_calls == steps * LAYERS


def test_setup_leaves_no_counts(mesh):
    model, _, _ = Setup(make=make_model).build(mesh)
    assert dmuon.comm_stats(model) == (dmuon.comm_stats(model, reset=True))
    assert dmuon.comm_stats(model).broadcast_bytes == 0


@pytest.mark.parametrize("z3", [True, False], ids=["z3", "z2"])
def test_gather_buffers_are_freed_when_promised(mesh, rank, z3):
    model, optimizer, _ = Setup(z3=z3, make=make_model).build(mesh)
    idle = dmuon.memory_report(model).live
    loss = loss_of(model, batch(0, rank))
    kept = "sharded" if z3 else "unsharded"
    assert {group.state for group in model._dmuon.groups} == {kept}
    if z3:
        assert dmuon.memory_report(model).live == idle
        assert all(p.untyped_storage().nbytes() == 0 for p in foreign_leaves(model))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    assert dmuon.memory_report(model).live == idle
    assert {group.state for group in model._dmuon.groups} == {"sharded"}
    with torch.no_grad():
        model(batch(0, rank))
    assert dmuon.memory_report(model).live == idle


def foreign_leaves(model) -> list[torch.Tensor]:
    """The unsharded parameters of matrices that other ranks own."""
    dedication = model._dmuon
    return [leaf for param, leaf in zip(dedication.params, dedication.unsharded, strict=True) if not param.is_owner]


@pytest.mark.parametrize("z3", [True, False], ids=["z3", "z2"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_peak_memory_is_what_the_plan_predicts(mesh, rank, z3, dtype):
    model, optimizer, _ = Setup(z3=z3, dtype=dtype, make=make_model).build(mesh)
    train_step(model, optimizer, rank)
    dmuon.memory_report(model, track=True)
    train_step(model, optimizer, rank)
    report = dmuon.memory_report(model)
    buffers = [state["momentum_buffer"] for state in optimizer.state.values() if "momentum_buffer" in state]
    momentum = sum(buffer.nbytes for buffer in buffers if not buffer.is_meta)
    assert momentum == report.predicted_momentum
    assert report.live + momentum == report.predicted_resident
    predicted = max(report.predicted_forward_peak, report.predicted_backward_peak)
    assert abs(report.peak + momentum - predicted) <= 0.02 * predicted, f"{report}"


def test_live_bytes_are_the_bytes_of_real_storages(mesh, rank):
    """The ledger counts; this looks at the tensors themselves."""
    model, optimizer, _ = Setup(dtype=torch.bfloat16, make=make_model).build(mesh)
    train_step(model, optimizer, rank)
    tensors = [
        t for param in dmuon.get_dedicated_params(model) for t in (param.parameter, param._owned_data) if t is not None
    ]
    tensors += [leaf.detach() for leaf in model._dmuon.unsharded]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if not t.is_meta}
    report = dmuon.memory_report(model)
    assert report.live - report.outgoing == sum(storages.values())


def test_a_waiting_rank_can_say_what_it_waits_for(mesh, rank, world_size):
    """Rank 0 comes when all others have said it, or not at all."""
    if world_size == 1 or mesh.device_type != "cpu":
        pytest.skip("only a host that waits can say so")
    model = make_model()
    dmuon.dedicate_params(model, mesh, is_matrix)
    store = dist.distributed_c10d._get_default_store()
    expected = f"rank (shard {rank}, replicate 0) waits for the gather of 'layers.0'"

    def ask() -> None:
        while expected not in dmuon.describe_progress():
            time.sleep(0.01)
        store.set(f"said/{rank}", "yes")

    if rank == 0:
        store.wait([f"said/{r}" for r in range(1, world_size)])
    else:
        threading.Thread(target=ask, daemon=True).start()
    model(batch(0, rank))
