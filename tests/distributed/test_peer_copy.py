"""comm="peer" on the GPUs of one host: the numbers of comm="nccl", with fewer bytes, and an error instead of a hang.

torchrun --standalone --nproc-per-node 2 -m pytest --on-device cuda tests/distributed/test_peer_copy.py
"""

import gc
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from reference import TinyModel, batch, is_matrix, loss_of
from setup import Setup, check_invariants
from test_branches import check_branches
from test_parity import train
from torch.distributed.fsdp import MixedPrecisionPolicy

import dmuon

pytestmark = [pytest.mark.gpu(count=2), pytest.mark.ranks(2, 3, 4)]
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
COMMS = ["nccl", "peer"]


@pytest.fixture(autouse=True)
def one_gpu_a_rank(mesh, pytestconfig) -> None:
    if pytestconfig.getoption("--on-device") != "cuda":
        pytest.skip("needs --on-device cuda")


def build(mesh, comm: str, z3: bool = True, policy: MixedPrecisionPolicy | None = None, **options) -> nn.Module:
    torch.manual_seed(0)
    model = TinyModel(dim=64, hidden=96, layers=4).to(mesh.device_type)
    dmuon.dedicate_params(model, mesh, is_matrix, comm=comm, reshard_after_forward=z3, mp_policy=policy, **options)
    if policy is not None and policy.param_dtype is not None:  # there is no FSDP2 here that would cast the rest
        for parameter in model.parameters():
            if not hasattr(parameter, "_dedicated_owner_rank"):
                parameter.data = parameter.data.to(policy.param_dtype)
    return model


def copies_from_peers(model: nn.Module) -> bool:
    return all(communicator.copies_from_peers() for communicator in model._dmuon.comms[:2])


def own_grads(model: nn.Module) -> dict[str, torch.Tensor]:
    return {p.name: p._reduced_grad.clone() for p in dmuon.get_dedicated_params(model) if p._reduced_grad is not None}


def accumulate(model: nn.Module, rank: int, seed: int = 0, keep_back: bool = False) -> dict[str, torch.Tensor]:
    """The reduced gradients of this rank's matrices after three micro-batches."""
    model.zero_grad()
    runtime = model._dmuon.runtime
    for micro in range(3):
        runtime.set_requires_gradient_sync(not keep_back or micro == 2, None)
        loss_of(model, batch(3 * seed + micro, rank).cuda()).backward()
    return own_grads(model)


def assert_same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value, b[name]), f"{name} differs by up to {(value - b[name]).abs().max()}"


def communicator(mesh, comm: str = "peer") -> torch.ScriptObject:
    group = mesh.get_group().group_name
    return torch.classes.dmuon.Communicator((group, group, comm, False), torch.device("cuda", mesh.get_rank()), False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8], ids=str)
def test_broadcast_of_every_size_and_dtype(mesh, rank, world_size, dtype):
    gathers = communicator(mesh)
    shared = gathers.share(False, 1 << 22)
    assert gathers.share(False, 256) is None
    roots = [i % world_size for i in range(7)]
    numels = [1, 3, 8, 1000, 4097, 0, 65536]
    places = [i * (1 << 19) for i in range(7)]
    for call in range(5):
        buffers = []
        for i, root in enumerate(roots):
            buffer = torch.zeros(numels[i], dtype=dtype, device="cuda")
            if root == rank:
                buffer = shared[places[i] : places[i] + buffer.nbytes].view(dtype)
                buffer.fill_(10 * rank + i + call)
            buffers.append(buffer)
        gathers.broadcast(roots, buffers, places)
        for i, root in enumerate(roots):
            assert bool(buffers[i].eq(10 * root + i + call).all()), f"segment {i} of call {call}"


def test_broadcast_without_a_place_goes_to_the_backend(mesh, rank):
    gathers = communicator(mesh)
    buffer = torch.full((8,), float(rank), device="cuda")
    gathers.broadcast([1], [buffer], [-1])
    assert bool(buffer.eq(1).all())


def expected_sum(values: list[torch.Tensor], own: int, total: torch.dtype, divisor: float) -> torch.Tensor:
    """In rank order; this rank's part has the dtype of the sum."""
    parts = [value.to(total).float() if r == own else value.float() for r, value in enumerate(values)]
    result = parts[0]
    for part in parts[1:]:
        result = result + part
    return (result * (torch.tensor(1.0) / divisor)).to(total)


@pytest.mark.parametrize("total", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sent", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sums_in_rank_order_in_fp32(mesh, rank, world_size, sent, total):
    """Odd sizes, several segments a root, other values and divisors every call; negative zeros stay negative."""
    sums = communicator(mesh)
    outgoing = sums.share(True, 1 << 20)
    roots = [0, 1, 0, world_size - 1, 1]
    numels = [1, 5, 4096, 1023, 100_001]
    places = sums.outgoing_places(roots, numels, sent.itemsize)
    for call in range(4):
        seeds = [torch.Generator().manual_seed(100 * call + r) for r in range(world_size)]
        values = [[torch.randn(n, generator=seed).to(sent) for n in numels] for seed in seeds]
        for of_rank in values:
            of_rank[4][:7] = -0.0
        buffers = []
        for i, root in enumerate(roots):
            mine = values[rank][i].cuda()
            if root != rank:
                buffers.append(outgoing[places[i] : places[i] + mine.nbytes].view(sent).copy_(mine))
            else:
                buffers.append(mine.to(total))
        divisor = 1.0 + call
        sums.reduce_shared(roots, buffers, sent, divisor)
        for i, root in enumerate(roots):
            if root == rank:
                expected = expected_sum([of_rank[i] for of_rank in values], rank, total, divisor)
                assert torch.equal(buffers[i].cpu(), expected), f"segment {i} of call {call}"
                assert torch.equal(torch.signbit(buffers[i].cpu()), torch.signbit(expected))


def test_peers_are_what_auto_finds_here(mesh):
    assert copies_from_peers(build(mesh, "auto"))
    assert copies_from_peers(build(mesh, "peer"))
    assert not copies_from_peers(build(mesh, "nccl"))


@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize("z3", [True, False], ids=["z3", "z2"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_parity_with_one_process(mesh, rank, world_size, comm, z3, dtype):
    train(Setup(z3=z3, dtype=dtype, recipe="b", comm=comm), mesh, rank, world_size)


@pytest.mark.parametrize("comm", COMMS)
def test_shapes_that_need_padding(mesh, rank, world_size, comm):
    train(Setup(make=lambda: TinyModel(dim=13, hidden=31, layers=2), comm=comm), mesh, rank, world_size)


@pytest.mark.parametrize("z3", [True, False], ids=["z3", "z2"])
@pytest.mark.parametrize("seed", range(3))
def test_ranks_take_different_branches(mesh, rank, world_size, z3, seed):
    options = {"mesh": mesh, "reshard_after_forward": z3, "comm": "peer"}
    check_branches(mesh, rank, world_size, seed, options)


@pytest.mark.parametrize("policy", [None, MIXED], ids=["fp32", "bf16"])
@pytest.mark.parametrize("keep_back", [False, True], ids=["sync", "no_sync"])
def test_two_runs_give_the_same_bits(mesh, rank, policy, keep_back):
    model = build(mesh, "peer", policy=policy)
    first = accumulate(model, rank, keep_back=keep_back)
    assert first
    for _ in range(3):
        assert_same_bits(accumulate(model, rank, keep_back=keep_back), first)
    check_invariants(model)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("policy", [None, MIXED], ids=["fp32", "bf16"])
@pytest.mark.parametrize("keep_back", [False, True], ids=["sync", "no_sync"])
def test_two_addends_have_the_bits_of_nccl(mesh, rank, policy, keep_back):
    peer, nccl = (accumulate(build(mesh, comm, policy=policy), rank, keep_back=keep_back) for comm in ("peer", "nccl"))
    assert_same_bits(peer, nccl)


@pytest.mark.parametrize("policy", [None, MIXED], ids=["fp32", "bf16"])
@pytest.mark.parametrize("z3", [True, False], ids=["z3", "z2"])
def test_outputs_have_the_bits_of_nccl(mesh, rank, policy, z3):
    """And weights that an optimizer has changed are what the next forward sees."""
    outputs = []
    for comm in COMMS:
        model = build(mesh, comm, z3=z3, policy=policy)
        with torch.no_grad():
            before = model(batch(0, rank).cuda())
            for p in dmuon.get_dedicated_params(model):
                if p.is_owner:
                    p.parameter.mul_(1.5)
            outputs.append((before, model(batch(0, rank).cuda())))
    for a, b in zip(*outputs, strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(*outputs[0])


def test_gradients_travel_in_their_own_dtype(mesh, rank, world_size):
    elements = {}
    for comm in COMMS:
        model = build(mesh, comm, policy=MIXED)
        dmuon.comm_stats(model, reset=True)
        loss_of(model, batch(0, rank).cuda()).backward()
        stats = dmuon.comm_stats(model)
        foreign = [p for p in dmuon.get_dedicated_params(model) if not p.is_owner]
        elements[comm] = sum(p.parameter.numel() for p in foreign)
        assert stats.reduce_bytes == elements[comm] * (2 if comm == "peer" else 4)
        assert stats.broadcast_bytes == 2 * elements[comm] * 2
    assert elements["peer"] == elements["nccl"]


def test_reproducible_sums_stay_with_nccl(mesh):
    gather, reduce, _ = build(mesh, "peer", reproducible=True)._dmuon.comms
    assert gather.copies_from_peers() and not reduce.copies_from_peers()


def test_a_dtype_that_peers_do_not_add_up(mesh):
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    gather, reduce, _ = build(mesh, "auto", policy=policy)._dmuon.comms
    assert gather.copies_from_peers() and not reduce.copies_from_peers()
    with pytest.raises(ValueError, match="float64"):
        build(mesh, "peer", policy=policy)


def test_the_host_does_not_wait(mesh, rank):
    """A forward is queued behind a second of other work; in backward torch finds nothing that waits."""
    model = build(mesh, "peer", policy=MIXED)
    tokens = batch(0, rank).cuda()
    for _ in range(2):
        loss_of(model, tokens).backward()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda._sleep(2_000_000_000)
    begin = time.perf_counter()
    loss = loss_of(model, tokens)
    assert time.perf_counter() - begin < 0.5
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_models_come_and_go(mesh, rank):
    """Memory is mapped, freed and mapped again; two models at a time, the first one ends first."""
    before = None
    for _ in range(4):
        first, second = build(mesh, "peer"), build(mesh, "peer")
        assert_same_bits(accumulate(first, rank), accumulate(second, rank))
        torch.cuda.synchronize()
        dist.barrier()
        del first
        gc.collect()
        accumulate(second, rank)
        torch.cuda.synchronize()
        dist.barrier()
        del second
        gc.collect()
        dist.barrier()
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
        before = before or free
    assert before - free < 64 * 2**20


def test_saving_a_master_saves_one_segment(mesh):
    """Masters that are sent as they are lie in shared memory, and torch.save writes whole storages."""
    own = [p.parameter for p in dmuon.get_dedicated_params(build(mesh, "peer")) if p.is_owner]
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in own}
    assert len(storages) > 1 and sum(storages.values()) == sum(p.nbytes for p in own)


@pytest.mark.ranks(2)
def test_a_hung_peer_is_an_error_that_names_it(mesh, rank, tmp_path):
    """In processes of their own, on the same GPUs: the error costs a process its GPU."""
    if rank == 0:
        script = Path(__file__).with_name("hung_peer.py")
        ranks = [
            subprocess.Popen(
                [sys.executable, str(script), str(index), str(tmp_path / "store")],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=os.environ | {"RANK": str(index), "LOCAL_RANK": str(index)},
            )
            for index in range(2)
        ]
        try:
            said = ranks[0].communicate(timeout=40)[0]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        assert "HEARD [dmuon.comm] rank 0 waited 5 s for rank 1 to join the gather" in said, said
        seconds = float(said.rpartition("AFTER ")[2].split()[0])
        assert 4 < seconds < 12, said
    dist.barrier()
