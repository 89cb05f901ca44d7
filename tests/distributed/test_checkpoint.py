"""Torch's own checkpoint functions on a dedicated model: what is in a state dict, and resuming with the same bits."""

import random

import pytest
import torch
import torch.nn as nn
from checkpoints import OddModel, Run, assert_equal, whole
from setup import Setup, check_invariants
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

import dmuon


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("z3", [True, False], ids=["z3", "z2"])
def test_resume_has_the_same_bits(mesh_2d, folder, z3, dtype):
    """DCP with torch's functions only; the new run begins with other values and has made other steps."""
    setup = Setup(z3=z3, dtype=dtype, make=OddModel)
    run = Run(mesh_2d, setup=setup).train(range(2))
    run.save(folder / "a")
    saved = run.values()
    final = run.train(range(2, 5)).values()

    other = Run(mesh_2d, seed=1, setup=setup, lr=0.3, adamw_lr=0.7).train(range(7, 8))
    other.load(folder / "a")
    check_invariants(other.model)
    assert_equal(other.values(), saved)
    assert_equal(other.train(range(2, 5)).values(), final)
    assert_equal(other.masters(), run.masters())


def test_state_dict_is_fsdp2s(mesh, folder):
    """Keys, order, shapes and dtypes of the undedicated model; dedicated matrices are cut by DTensor's own rule."""
    run = Run(mesh).train(range(1))
    plain = OddModel().state_dict()
    state = run.model.state_dict()
    assert list(state) == list(plain)
    for key, value in state.items():
        assert value.shape == plain[key].shape and value.dtype == plain[key].dtype, key
    assert state["layers.0.tied.weight"] is state["layers.1.tied.weight"]
    for name in [param.name for param in dmuon.get_dedicated_params(run.model)]:
        by_torch = torch.distributed.tensor.distribute_tensor(plain[name], mesh, state[name].placements)
        assert state[name].to_local().shape == by_torch.to_local().shape, name
    assert list(run.model.layers[1].state_dict()) == [k[9:] for k in plain if k.startswith("layers.1.")]


def test_loading_uses_the_memory_that_is_there(mesh):
    """Masters, momentum and AdamW's state keep their storage: a load needs no second copy of them on the device."""

    def places() -> dict[str, int]:
        local = {}
        for p, state in run.optimizer.state.items():
            for key, value in ({"weight": p.detach()} | state).items():
                tensor = value.to_local() if isinstance(value, DTensor) else value
                if not tensor.is_meta:
                    local[f"{run.optimizer._names[p]}.{key}"] = tensor.data_ptr()
        return local

    run = Run(mesh).train(range(2))
    snapshot, saved = dmuon.get_state_dict(run.model, run.optimizer), run.values()
    before = places()
    assert {name.rpartition(".")[2] for name in before} >= {"weight", "exp_avg", "exp_avg_sq", "step"}
    run.train(range(2, 3))
    dmuon.set_state_dict(run.model, run.optimizer, snapshot)
    assert places() == before
    assert_equal(run.values(), saved)


@pytest.mark.parametrize("replicate_async", [True, False], ids=["async", "sync"])
def test_save_and_load_checkpoint(mesh_2d, folder, replicate_async):
    """dmuon's own directory: values, options, and anything else the user adds."""
    setup = Setup(make=OddModel, replicate_async=replicate_async)
    run = Run(mesh_2d, setup=setup, lr=0.004).train(range(2))
    dmuon.save_checkpoint(folder / "a", run.model, run.optimizer, extra={"step": 2, "order": torch.arange(5)})
    saved = run.values()
    final = run.train(range(2, 4)).values()

    other = Run(mesh_2d, seed=1, setup=setup, lr=0.3)
    extra = dmuon.load_checkpoint(
        folder / "a", other.model, other.optimizer, extra={"step": 0, "order": torch.zeros(5, dtype=torch.long)}
    )
    assert extra["step"] == 2 and torch.equal(extra["order"], torch.arange(5))
    assert [group["lr"] for group in other.optimizer.param_groups if group["use_muon"]] == [0.004]
    assert_equal(other.values(), saved)
    assert_equal(other.train(range(2, 4)).values(), final)


class Outer(nn.Module):
    """A model around a dedicated one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.extra = nn.Parameter(torch.zeros(3))


FROZEN = ("embedding.weight", "layers.0.up.weight", "layers.0.up.bias", "layers.1.tied.weight")


def part_frozen() -> nn.Module:
    model = OddModel()
    for name in FROZEN:
        model.get_parameter(name).requires_grad_(False)
    return model


@pytest.mark.parametrize("recipe", ["a", "b", "c"])
def test_frozen_parameters_keep_their_state(mesh_2d, folder, recipe):
    """All are trained, then some are frozen, then all are trained again: three runs, each from the last one's file."""
    first = Run(mesh_2d, setup=Setup(make=OddModel, recipe=recipe)).train(range(2))
    dmuon.save_checkpoint(folder / "a", first.model, first.optimizer)
    second = Run(mesh_2d, seed=1, setup=Setup(make=part_frozen, recipe=recipe))
    dmuon.load_checkpoint(folder / "a", second.model, second.optimizer)
    assert_equal(second.values(), before := first.values())
    after = second.train(range(2, 4)).values()
    kept = [key for key in after if any(name in key for name in FROZEN)]
    assert len(kept) > 2 * len(FROZEN) and all(torch.equal(after[key], before[key]) for key in kept)
    dmuon.save_checkpoint(folder / "b", second.model, second.optimizer)
    third = Run(mesh_2d, seed=2, setup=Setup(make=OddModel, recipe=recipe))
    dmuon.load_checkpoint(folder / "b", third.model, third.optimizer)
    assert_equal(third.values(), after)


@pytest.mark.ranks(2, 4)
def test_wrappers_parts_and_models_around(hsdp_mesh):
    """Names are those of the model without wrappers; a part, or a model around, loads and is published at once."""
    run, wrapped = Run(hsdp_mesh).train(range(1)), OddModel()
    for index, layer in enumerate(wrapped.layers):
        wrapped.layers[index] = checkpoint_wrapper(layer)
    Setup(make=OddModel).wrap(wrapped, hsdp_mesh)
    compiled = torch.compile(wrapped, backend="eager")
    state = get_model_state_dict(run.model)
    assert list(get_model_state_dict(wrapped)) == list(get_model_state_dict(compiled)) == list(state)
    set_model_state_dict(compiled, dict(state))
    assert_equal(whole(get_model_state_dict(wrapped)), whole(state))

    other = Run(hsdp_mesh, seed=1)
    outer = Outer(other.model)
    outer.load_state_dict({f"inner.{key}": value for key, value in state.items()} | {"extra": torch.ones(3)})
    assert_equal(
        whole(outer.state_dict()), whole({f"inner.{k}": v for k, v in state.items()}) | {"extra": torch.ones(3)}
    )
    check_invariants(other.model)
    other = Run(hsdp_mesh, seed=1)
    before = other.values()
    other.model.layers[0].load_state_dict(run.model.layers[0].state_dict())
    check_invariants(other.model)
    after = other.values()
    taken = "model/layers.0.down.weight"
    assert torch.equal(after[taken], run.values()[taken]) and not torch.equal(before[taken], after[taken])
    other.train(range(1))
    with pytest.raises(RuntimeError, match=r"'weight' is \[2, 2\], expected \[7, 10\]"):
        other.model.layers[0].up.load_state_dict({"weight": torch.zeros(2, 2)}, strict=False)


class Term(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum().tanh()


class Terms(nn.Module):
    def __init__(self, weights: list[torch.Tensor], idle: set[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Term(weight) for weight in weights])
        self.idle = idle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(layer(x) for i, layer in enumerate(self.layers) if i not in self.idle)


@pytest.mark.ranks(3)
@pytest.mark.filterwarnings("ignore:.*no matrix has a gradient:RuntimeWarning")
@pytest.mark.parametrize("seed", range(8))
def test_random_models_and_settings(mesh, folder, seed):
    """Shapes, ties, frozen matrices, Z2 or Z3, dtypes and gradients that some matrices do not get, by seed."""
    dice = random.Random(seed)
    shapes = [(dice.randint(1, 9), dice.randint(1, 9)) for _ in range(dice.randint(1, 6))]
    frozen = {i for i in range(len(shapes)) if dice.random() < 0.3}
    idle = {i for i in range(len(shapes)) if dice.random() < 0.3}
    dtype, z3 = dice.choice([torch.float32, torch.bfloat16]), dice.random() < 0.5

    def build(number: int) -> tuple[nn.Module, dmuon.Muon]:
        torch.manual_seed(number)
        model = Terms([torch.randn(shape, dtype=dtype) for shape in shapes], idle)
        for i in frozen:
            model.layers[i].weight.requires_grad_(False)
        dmuon.dedicate_params(model, mesh, lambda n, p: True, reshard_after_forward=z3)
        return model, dmuon.Muon(model)

    def train(model: nn.Module, optimizer: dmuon.Muon, steps: range) -> None:
        for step in steps:
            x = torch.tensor(1.0 + 0.1 * step + mesh.get_local_rank(), dtype=dtype, requires_grad=True)
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = build(seed)
    train(model, optimizer, range(2))
    dmuon.save_checkpoint(folder / "a", model, optimizer)
    saved = whole(dmuon.get_state_dict(model, optimizer))
    train(model, optimizer, range(2, 4))
    other, its_optimizer = build(seed + 100)
    dmuon.load_checkpoint(folder / "a", other, its_optimizer)
    assert_equal(whole(dmuon.get_state_dict(other, its_optimizer)), saved)
    train(other, its_optimizer, range(2, 4))
    assert_equal(whole(dmuon.get_state_dict(other, its_optimizer)), whole(dmuon.get_state_dict(model, optimizer)))
