"""Checkpoints of recipe c: resuming with the same bits, on other meshes, and to and from runs with FSDP2."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from checkpoints import Run, assert_close, assert_equal, flat, loss_of, plain_optimizers, samples, whole
from elementwise import Transformer
from plain_model import OddModel
from reference import VOCAB
from setup import Setup, check_invariants
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

import dmuon

ADAMW = ("exp_avg", "exp_avg_sq")


def recipe(name: str, **options) -> Setup:
    return Setup(recipe=name, **({"make": OddModel} | options))


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("make", [OddModel, Transformer], ids=lambda make: make.__name__)
@pytest.mark.parametrize("z3,dtype", [(True, None), (False, torch.bfloat16)], ids=["z3-fp32", "z2-bf16"])
def test_resume_has_the_same_bits(mesh_2d, folder, make, z3, dtype):
    """The new run begins with other values and has made other steps; 1-D, 3-D, tied, frozen and uneven parameters."""
    setup = recipe("c", z3=z3, dtype=dtype, make=make)
    run = Run(mesh_2d, setup=setup).train(range(2))
    run.save(folder / "a")
    dmuon.save_checkpoint(folder / "b", run.model, run.optimizer)
    saved = run.values()
    final = run.train(range(2, 5)).values()
    for name in ("a", "b"):
        other = Run(mesh_2d, seed=1, setup=setup, lr=0.3, adamw_lr=0.7).train(range(7, 8))
        if name == "a":
            other.load(folder / name)
        else:
            dmuon.load_checkpoint(folder / name, other.model, other.optimizer)
        check_invariants(other.model)
        assert_equal(other.values(), saved)
        assert_equal(other.train(range(2, 5)).values(), final)
        assert_equal(other.masters(), run.masters())


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("make", [OddModel, Transformer], ids=lambda make: make.__name__)
def test_state_dicts_are_fsdp2s(mesh, make):
    """Keys, shapes, dtypes, placements, local shapes, strides and options are those of the run with fully_shard."""
    states = {name: Run(mesh, setup=recipe(name, make=make)).train(range(2)).state() for name in "bc"}
    ours, theirs = (flat(states[name]) for name in "cb")
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        found = ours[key]
        if not isinstance(value, torch.Tensor):
            assert key.endswith("/params") or type(found) is type(value), key
            continue
        assert (found.shape, found.dtype, type(found)) == (value.shape, value.dtype, type(value)), key
        if isinstance(value, DTensor):
            assert (found.placements, found.stride()) == (value.placements, value.stride()), key
            assert found.to_local().shape == value.to_local().shape, key
        else:
            torch.testing.assert_close(found, value)  # step


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("source,target", [("b", "c"), ("c", "b")])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_between_recipes(mesh, folder, source, target, dtype):
    """What fully_shard managed becomes elementwise, and back: the same bits, and training goes on as it would have."""
    run = Run(mesh, setup=recipe(source, dtype=dtype)).train(range(2))
    run.save(folder / "a")
    dmuon.save_checkpoint(folder / "b", run.model, run.optimizer)
    saved = run.values()
    for name in ("a", "b"):
        other = Run(mesh, seed=1, setup=recipe(target, dtype=dtype), lr=0.3)
        if name == "a":
            other.load(folder / name)
        else:
            dmuon.load_checkpoint(folder / name, other.model, other.optimizer)
        assert_equal(other.values(), saved)
    expected = run.train(range(2, 4)).values()
    # The sums over ranks are made in another order.
    assert_close(other.train(range(2, 4)).values(), expected, 1e-5 if dtype is None else 2e-2)


@pytest.mark.ranks(1, 3)
def test_from_and_to_plain_torch(mesh, folder):
    """torch.optim.Muon's and AdamW's states as whole tensors; a full state dict; safetensors."""
    torch.manual_seed(0)
    plain = OddModel()
    matrices, rest, optimizers = plain_optimizers(plain)
    for step in range(2):
        loss_of(plain, samples(step)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    states = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
    run = Run(mesh, seed=1, setup=recipe("c"))
    report = dmuon.import_state(run.model, run.optimizer, plain.state_dict(), *states)
    assert sorted(report["state"]) == sorted([*matrices, *rest]) and report["ignored"] == []
    assert_equal(whole(run.model.state_dict()), plain.state_dict())
    values = run.values()
    for (index, name), field in itertools.product(enumerate(rest), (*ADAMW, "step")):
        assert torch.equal(values[f"optimizer/state/{name}/{field}"].cpu(), states[1]["state"][index][field]), name
    run.train(range(2, 3))
    safetensors = pytest.importorskip("safetensors.torch")
    dmuon.export_safetensors(folder / "model.safetensors", run.model)
    dist.barrier()
    assert_equal(safetensors.load_file(folder / "model.safetensors"), whole(run.model.state_dict()))


@pytest.mark.ranks(2, 4)
def test_full_states_and_back(hsdp_mesh, rank):
    run = Run(hsdp_mesh, setup=recipe("c")).train(range(2))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_state = get_model_state_dict(run.model, options=options)
    optimizer_state = get_optimizer_state_dict(run.model, run.optimizer, options=options)
    assert bool(model_state) == (rank == 0)
    model_state, optimizer_state = copy.deepcopy((model_state, optimizer_state))
    final = run.train(range(2, 4)).values()
    other = Run(hsdp_mesh, seed=1, setup=recipe("c"), lr=0.7)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other.model, model_state, options=options)
    set_optimizer_state_dict(other.model, other.optimizer, optimizer_state, options=options)
    assert_equal(other.train(range(2, 4)).values(), final)


@pytest.mark.ranks(2)
def test_wrong_states_change_nothing(mesh):
    run = Run(mesh, setup=recipe("c")).train(range(1))
    before, state = run.values(), run.optimizer.state_dict()
    broken = copy.deepcopy(state)
    key = next(k for k, values in broken["state"].items() if "exp_avg" in values)
    broken["state"][key]["exp_avg"] = torch.zeros(3, 3, 3)
    with pytest.raises(RuntimeError, match=r"'embedding.weight.exp_avg' is \[3, 3, 3\]"):
        run.optimizer.load_state_dict(broken)
    broken = copy.deepcopy(state)
    del broken["state"][key]["exp_avg_sq"]
    with pytest.raises(RuntimeError, match="missing keys: 'embedding.weight.exp_avg_sq'"):
        run.optimizer.load_state_dict(broken)
    weights = run.model.state_dict()
    weights["head.bias"] = torch.zeros(VOCAB + 1)
    with pytest.raises(RuntimeError, match="'head.bias' is"):
        run.model.load_state_dict(weights)
    assert_equal(run.values(), before)
