"""Other formats and other runs: one process in plain torch, FSDP2 without dmuon, safetensors, torch.optim.Muon, threads
that write while training goes on.
"""

import copy
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from checkpoints import OddModel, Run, assert_equal, loss_of, plain_optimizers, samples, whole
from setup import Setup
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import dmuon

TESTS = Path(__file__).parent
LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def weights(run: Run) -> dict[str, torch.Tensor]:
    return whole(run.model.state_dict())


def without_dmuon(code: str, folder: Path) -> None:
    """Runs it on one process, with plain torch and the tests' model; dmuon cannot be imported."""
    prelude = (
        "import sys; sys.modules['dmuon'] = None\n"
        f"sys.path.insert(0, {str(TESTS)!r})\n"
        "import torch, torch.distributed.checkpoint as dcp\n"
        "from plain_model import OddModel\n"
        f"folder = {str(folder)!r}\n"
    )
    environment = {k: v for k, v in os.environ.items() if k not in LAUNCH and not k.startswith("TORCHELASTIC")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", prelude + code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.ranks(1, 3)
def test_plain_torch_without_dmuon_reads_and_writes(mesh, folder, rank):
    """The same DCP files in both directions; and torch.save of a full state dict."""
    run = Run(mesh).train(range(2))
    dcp.save({"model": get_model_state_dict(run.model)}, checkpoint_id=folder / "dcp")
    dmuon.save_checkpoint(folder / "ours", run.model, run.optimizer)
    full = get_model_state_dict(run.model, options=FULL)
    expected = weights(run)
    if rank == 0:
        torch.save(full, folder / "full.pt")
        torch.save(expected, folder / "expected.pt")
        without_dmuon(
            "expected = torch.load(folder + '/expected.pt')\n"
            "for name in ('dcp', 'ours'):\n"
            "    model = OddModel()\n"
            "    state = {'model': model.state_dict()}\n"
            "    dcp.load(state, checkpoint_id=f'{folder}/{name}', no_dist=True)\n"
            "    model.load_state_dict(state['model'])\n"
            "    for key, value in model.state_dict().items():\n"
            "        assert torch.equal(value, expected[key]), (name, key)\n"
            "model.load_state_dict(torch.load(folder + '/full.pt'))\n"
            "assert all(torch.equal(v, expected[k]) for k, v in model.state_dict().items())\n"
            "torch.manual_seed(5)\n"
            "model = OddModel()\n"
            "dcp.save({'model': model.state_dict()}, checkpoint_id=folder + '/plain', no_dist=True)\n"
            "torch.save(model.state_dict(), folder + '/plain.pt')\n",
            folder,
        )
    dist.barrier()
    plain = torch.load(folder / "plain.pt")
    state = {"model": get_model_state_dict(run.model)}
    dcp.load(state, checkpoint_id=folder / "plain")
    set_model_state_dict(run.model, state["model"])
    assert_equal(weights(run), plain)
    other = Run(mesh, seed=2)
    before = list(other.model.parameters())
    set_model_state_dict(other.model, dict(plain), options=StateDictOptions(full_state_dict=True))
    assert_equal(weights(other), plain)
    assert all(a is b for a, b in zip(before, other.model.parameters(), strict=True)), "not the optimizer's any more"


@pytest.mark.ranks(2, 4)
def test_full_state_on_rank_0_and_back(hsdp_mesh, rank):
    """broadcast_from_rank0: only rank 0 has the state.  Parameters stay the optimizer's own, and training goes on."""
    run = Run(hsdp_mesh).train(range(2))
    model_state, optimizer_state = get_state_dict(run.model, run.optimizer, options=FULL)
    assert bool(model_state) == (rank == 0)
    model_state, optimizer_state = copy.deepcopy((model_state, optimizer_state))
    final = run.train(range(2, 4)).values()
    other = Run(hsdp_mesh, seed=1, lr=0.7)
    before = list(other.model.parameters())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other.model, model_state, options=options)
    set_optimizer_state_dict(other.model, other.optimizer, optimizer_state, options=options)
    assert all(a is b for a, b in zip(before, other.model.parameters(), strict=True))
    assert_equal(other.train(range(2, 4)).values(), final)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_to_and_from_fsdp2_without_dmuon(mesh, folder, dtype):
    """A run with FSDP2 and AdamW hands over its weights, and takes ours."""
    setup = Setup(make=OddModel, dtype=dtype)
    torch.manual_seed(3)
    plain = OddModel()
    for layer in plain.layers:
        layer.tied.weight = nn.Parameter(layer.tied.weight.detach().clone())  # FSDP2 wants one module a parameter
        fully_shard(layer, mesh=mesh, mp_policy=setup.policy)
    fully_shard(plain, mesh=mesh, mp_policy=setup.policy)
    adamw = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    size = 12 // mesh.size()
    loss_of(plain, samples(0)[mesh.get_local_rank() * size :][:size]).backward()
    adamw.step()
    plain.layers[1].tied.weight.data.copy_(plain.layers[0].tied.weight.data)
    state = {"model": get_model_state_dict(plain), "optimizer": get_optimizer_state_dict(plain, adamw)}
    dcp.save(state, checkpoint_id=folder / "plain")
    expected = whole(state["model"])

    run = Run(mesh, setup=setup)
    taken = {"model": get_model_state_dict(run.model)}
    dcp.load(taken, checkpoint_id=folder / "plain")
    set_model_state_dict(run.model, taken["model"])
    assert_equal(weights(run), expected)

    run.train(range(1))
    dcp.save({"model": get_model_state_dict(run.model)}, checkpoint_id=folder / "ours")
    back = {"model": get_model_state_dict(plain)}
    dcp.load(back, checkpoint_id=folder / "ours")
    set_model_state_dict(plain, back["model"])
    assert_equal(whole(get_model_state_dict(plain)), weights(run))

    report = dmuon.import_state(
        run.model,
        run.optimizer,
        get_model_state_dict(plain, options=StateDictOptions(full_state_dict=True)),
        get_optimizer_state_dict(plain, adamw, options=StateDictOptions(full_state_dict=True)),
    )
    assert report["weights"] == list(run.model.state_dict())
    assert set(report["state"]) == {n for n, p in run.model.named_parameters() if isinstance(p, DTensor)}
    assert set(report["fresh"]) == {param.name for param in dmuon.get_dedicated_params(run.model)}
    assert "layers.0.up.weight.exp_avg" in report["ignored"]
    ours, theirs = run.values(), whole(get_optimizer_state_dict(plain, adamw))
    assert torch.equal(ours["optimizer/state/head.bias/exp_avg"], theirs["state/head.bias/exp_avg"])
    assert float(ours["optimizer/state/layers.0.up.weight/momentum_buffer"].abs().max()) == 0.0
    run.train(range(1, 2))


def train_in_plain_torch(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], matrices: dict[str, nn.Parameter]
) -> dict[str, torch.Tensor]:
    """Two steps; returns the decaying sum of each matrix's gradients."""
    sums: dict[str, torch.Tensor] = {}
    for step in range(2):
        loss_of(model, samples(step)).backward()
        sums = {name: 0.9 * sums.get(name, 0.0) + p.grad for name, p in matrices.items()}
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return sums


@pytest.mark.ranks(1, 3)
def test_torchs_muon_hands_over_its_momentum(mesh, folder, rank):
    """torch.optim.Muon keeps a mean of gradients, dmuon a sum: the next step has the same direction after scaling."""
    torch.manual_seed(0)
    plain = OddModel()
    matrices, rest, optimizers = plain_optimizers(plain)
    sums = train_in_plain_torch(plain, optimizers, matrices)
    states = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
    run = Run(mesh, seed=1)
    report = dmuon.import_state(run.model, run.optimizer, plain.state_dict(), *states)
    assert_equal(weights(run), plain.state_dict())
    assert sorted(report["state"]) == sorted([*matrices, *rest]) and report["ignored"] == []
    assert sorted(report["fresh"]) == ["layers.0.frozen.weight", "layers.1.frozen.weight"]
    values = run.values()
    for name, expected in sums.items():
        found = values[f"optimizer/state/{name}/momentum_buffer"]
        assert (found - expected).norm() <= 1e-5 * expected.norm(), name
    run.train(range(2, 3))
    unnamed = torch.optim.AdamW(rest.values()).state_dict()
    with pytest.raises(ValueError, match="no parameter names"):
        dmuon.import_state(run.model, run.optimizer, plain.state_dict(), unnamed)


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_safetensors(mesh, folder, rank, dtype):
    """Read by Hugging Face's own library."""
    safetensors = pytest.importorskip("safetensors.torch")
    run = Run(mesh).train(range(1))
    dmuon.export_safetensors(folder / "model.safetensors", run.model, dtype=dtype)
    expected = {k: v.to(dtype) if dtype else v for k, v in weights(run).items()}
    if rank == 0:
        assert_equal(safetensors.load_file(folder / "model.safetensors"), expected)
        assert os.listdir(folder) == ["model.safetensors"]
    with pytest.raises(RuntimeError, match="cannot write"):
        dmuon.export_safetensors(folder / "no" / "model.safetensors", run.model)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("replicate_async", [True, False], ids=["async", "sync"])
def test_async_save_while_training_goes_on(mesh, hsdp_mesh, folder, replicate_async):
    """The snapshot is of the moment of the call, publishes under way included; later steps do not tear it."""
    setup = Setup(make=OddModel, replicate_async=replicate_async)
    chosen = mesh if mesh.size() == 2 else hsdp_mesh
    run = Run(chosen, setup=setup).train(range(2))
    group = dist.new_group(backend="gloo")  # on CPU, training and the writing thread would mix their messages in one
    future = dcp.async_save(run.state(), checkpoint_id=folder / "a", process_group=group)
    final = run.train(range(2, 5)).values()
    future.result()
    other = Run(chosen, seed=1, setup=setup)
    other.load(folder / "a")
    assert_equal(other.train(range(2, 5)).values(), final)


@pytest.mark.ranks(2)
def test_get_and_set_state_dict_is_a_snapshot_in_host_memory(mesh):
    run = Run(mesh).train(range(2))
    saved = run.values()
    state = dmuon.get_state_dict(run.model, run.optimizer)
    run.train(range(2, 4))
    dmuon.set_state_dict(run.model, run.optimizer, state)
    assert_equal(run.values(), saved)
    run.train(range(2, 4))
    dmuon.set_state_dict(run.model, run.optimizer, state)
    assert_equal(run.values(), saved)


def peak_bytes(act: Callable[[], object]) -> int:
    """Largest sum of what this thread allocated and has not freed."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        kept = act()
    now = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    del kept
    return peak


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(256, 256, bias=False) for _ in range(12)])


@pytest.mark.ranks(2)
def test_extra_memory_is_one_matrix(mesh):
    """Beside the rows themselves, which are a half of all weights and momentum here."""
    model = Stack()
    dmuon.dedicate_params(model, mesh, lambda name, p: True)
    optimizer = dmuon.Muon(model)
    assert len(optimizer.state) == 12
    matrix = 4 * 256 * 256
    rows = 12 * 2 * matrix // 2
    assert rows <= peak_bytes(lambda: dmuon.get_state_dict(model, optimizer)) <= rows + 1.1 * matrix
    assert rows // 2 <= peak_bytes(model.state_dict) <= rows // 2 + 1.1 * matrix
    state = dmuon.get_state_dict(model, optimizer)
    assert peak_bytes(lambda: dmuon.set_state_dict(model, optimizer, state)) <= 1.1 * matrix


def run_example(folder: Path, steps: int) -> list[str]:
    with socket.socket() as bound:
        bound.bind(("localhost", 0))
        port = bound.getsockname()[1]
    values = ("0", "1", "0", "localhost", str(port))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC")} | dict(
        zip(LAUNCH, values, strict=True)
    )
    command = [sys.executable, "-W", "ignore", str(TESTS.parents[1] / "examples/resume.py"), "--folder", str(folder)]
    command += ["--steps", str(steps), "--every", "3"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.ranks(1)
def test_the_example_goes_on_with_the_same_losses(folder):
    whole_run = run_example(folder / "a", 6)
    assert len(whole_run) == 6
    assert run_example(folder / "b", 4) + run_example(folder / "b", 6) == whole_run[:4] + whole_run[3:]
