"""What users do to a model after dedicate_params: it works as in torch, or is refused with the parameter's name."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.utils.prune as prune
from reference import TinyModel, batch, loss_of
from setup import Setup, full_values, step_both

import dmuon

pytestmark = pytest.mark.ranks(2, 3)


def small() -> TinyModel:
    return TinyModel(dim=16, hidden=24, layers=3)


def freeze(model: nn.Module, frozen: set[str], among: set[str] | None = None) -> None:
    for name, parameter in model.named_parameters():
        if among is None or name in among:
            parameter.requires_grad_(not any(part in name for part in frozen))


def train_both(mesh, model, optimizer, reference, step: int, rank: int, world_size: int) -> None:
    """One step of both; momentum of the reference knows which matrices have a gradient."""
    loss_of(model, batch(step, rank)).backward()
    reference.backward([loss_of(reference, batch(step, r)) for r in range(world_size)], world_size)
    step_both(mesh, model, optimizer, reference)


PHASES = [set(), {"layers.1"}, {"mix", "layers.2.up"}, {"layers.0", "head"}, set()]


@pytest.mark.parametrize("z3", [True, False], ids=["z3", "z2"])
def test_freezing_and_unfreezing(mesh, rank, world_size, z3):
    """Gradients, updates and bytes follow `requires_grad`, step by step; FSDP2's own parameters stay as they are."""
    model, optimizer, reference = Setup(z3=z3, make=small, recipe="b").build(mesh)
    reference.matrices = {n: p for n, p in reference.model.named_parameters() if "layers" in n and p.ndim == 2}
    dedicated = {param.name for param in dmuon.get_dedicated_params(model)}
    for step, frozen in enumerate(PHASES):
        for each in (model, reference.model):
            freeze(each, frozen, among=dedicated)
        dmuon.comm_stats(model, reset=True)
        train_both(mesh, model, optimizer, reference, step, rank, world_size)
        trained = [p.parameter for p in dmuon.get_dedicated_params(model) if p.parameter.requires_grad]
        sent = torch.tensor(dmuon.comm_stats(model).reduce_bytes)
        dist.all_reduce(sent)
        assert int(sent) == (world_size - 1) * 4 * sum(p.numel() for p in trained)


@pytest.mark.parametrize("recipe", ["a", "b"])
def test_only_adapters_are_trained(mesh, rank, world_size, recipe):
    """LoRA by hand: frozen base matrices, small trained ones beside them in the same groups, all dedicated."""

    class Adapted(TinyModel):
        def __init__(self) -> None:
            super().__init__(dim=16, hidden=24, layers=2)
            for layer in self.layers:
                layer.down_a = nn.Linear(24, 2, bias=False)
                layer.down_b = nn.Linear(2, 16, bias=False)
                layer.register_forward_hook(lambda m, args, out: out + m.down_b(m.down_a(m.up(args[0]))))
            self.requires_grad_(False)
            for layer in self.layers:
                layer.down_a.requires_grad_(True)
                layer.down_b.requires_grad_(True)

    model, optimizer, reference = Setup(make=Adapted, recipe=recipe).build(mesh)
    dmuon.comm_stats(model, reset=True)
    for step in range(3):
        train_both(mesh, model, optimizer, reference, step, rank, world_size)
    sent = torch.tensor(dmuon.comm_stats(model).reduce_bytes)
    dist.all_reduce(sent)
    assert int(sent) == 3 * (world_size - 1) * 4 * 2 * (24 * 2 + 2 * 16)


def test_a_frozen_parameter_that_nobody_averages_cannot_be_unfrozen_silently(mesh, rank, world_size):
    if world_size == 1:
        pytest.skip("one rank needs no average")
    model = TinyModel(dim=16, hidden=24, layers=2).to(mesh.device_type)
    freeze(model, {"embedding", "head", "norm", "bias"})
    dmuon.dedicate_params(model, mesh, lambda n, p: p.ndim == 2 and "layers" in n)
    optimizer = dmuon.Muon(model)
    model.head.weight.requires_grad_(True)
    loss_of(model, batch(0, rank).to(mesh.device_type)).backward()
    with pytest.raises(RuntimeError, match=r"'head\.weight' was frozen when the optimizer was built"):
        optimizer.step()


def test_add_param_group(mesh, rank, world_size):
    """Layers that join the optimizer later, with values of their own; schedulers see every group."""
    model, _, reference = Setup(make=small).build(mesh)
    late = [p for n, p in model.named_parameters() if "layers.2" in n]
    early = [p for n, p in model.named_parameters() if "layers.2" not in n]
    for p in late:
        p.requires_grad_(False)
    optimizer = dmuon.Muon(model, param_groups=[{"params": early, "lr": 0.005, "weight_decay": 0.01}])
    for p in late:
        p.requires_grad_(True)
    optimizer.add_param_group({"params": late, "name": "late", "lr": 0.005, "weight_decay": 0.01, "adamw_lr": 1e-3})
    assert [g["name"] for g in optimizer.param_groups if g["use_muon"]] == ["default/muon", "late/muon"]
    before = len(optimizer.param_groups)
    model.extra = nn.Parameter(torch.ones(3, device=mesh.device_type))
    with pytest.raises(ValueError, match="'layers.2.*' is in param_groups more than once"):
        optimizer.add_param_group({"params": [model.extra, *late]})
    assert len(optimizer.param_groups) == before, "a group that was refused left a part behind"
    del model.extra
    with pytest.raises(ValueError, match="unknown keys"):
        optimizer.add_param_group({"params": late, "learning_rate": 1.0})
    for step in range(2):
        train_both(mesh, model, optimizer, reference, step, rank, world_size)


def test_schedulers_act_per_group(mesh, rank, world_size):
    model, optimizer, reference = Setup(make=small).build(mesh)
    muon = [lambda step: 0.5**step] * sum(g["use_muon"] for g in optimizer.param_groups)
    rest = [lambda step: 1.0 / (1 + step)] * (len(optimizer.param_groups) - len(muon))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [*muon, *rest])
    initial = reference.settings.lr, reference.settings.adamw_lr
    for step in range(3):
        reference.settings.lr = initial[0] * 0.5**step
        reference.adamw.param_groups[0]["lr"] = initial[1] / (1 + step)
        train_both(mesh, model, optimizer, reference, step, rank, world_size)
        scheduler.step()
    reference.settings.lr = initial[0]


def test_ema_of_weights(mesh, rank, world_size):
    """Kept as users keep it, over named_parameters: owners have values, the others placeholders."""
    model, optimizer, reference = Setup(make=small).build(mesh)
    averages = {n: p.detach().clone() for n, p in model.named_parameters()}
    expected = {n: p.detach().clone() for n, p in reference.model.named_parameters()}
    for step in range(3):
        train_both(mesh, model, optimizer, reference, step, rank, world_size)
        with torch.no_grad():
            for n, p in model.named_parameters():
                averages[n].lerp_(p, 0.1)
            for n, p in reference.model.named_parameters():
                expected[n].lerp_(p, 0.1)
    for name, value in full_values(model).items():
        mine = averages[name]
        mine = mine.full_tensor() if hasattr(mine, "full_tensor") else mine
        torch.testing.assert_close(mine, expected[name], rtol=1e-3 if mesh.device_type == "cuda" else 1e-5, atol=1e-5)
        assert value.shape == mine.shape


def test_hooks_of_users_run(mesh, rank, world_size):
    """Post-accumulate hooks once per owned gradient, full backward hooks once per module call."""
    model, optimizer, _ = Setup(make=small).build(mesh)
    seen: list[str] = []
    for param in dmuon.get_dedicated_params(model):
        param.parameter.register_post_accumulate_grad_hook(lambda p, name=param.name: seen.append(name))
    calls: list[int] = []
    for index, layer in enumerate(model.layers):
        layer.register_full_backward_hook(lambda m, gin, gout, index=index: calls.append(index))
    loss_of(model, batch(0, rank)).backward()
    assert sorted(seen) == sorted(p.name for p in dmuon.get_dedicated_params(model) if p.is_owner)
    assert calls == [2, 1, 0]


@pytest.mark.parametrize("how", ["assign", "prune", "parametrize"])
def test_a_replaced_parameter_is_refused(mesh, rank, how):
    model, _, _ = Setup(make=small).build(mesh)
    mix = model.layers[1].mix
    if how == "assign":
        mix.weight = nn.Parameter(torch.zeros(16, 16, device=mesh.device_type))
    elif how == "prune":
        del mix._parameters["weight"]
        mix.weight = torch.zeros(16, 16, device=mesh.device_type)
    else:
        torch.nn.utils.parametrize.register_parametrization(mix, "weight", nn.Identity())
    held = mix.weight
    for _ in range(2):  # the error changes nothing
        with pytest.raises(RuntimeError, match=r"'layers\.1\.mix\.weight' was replaced after dedicate_params"):
            model(
                batch(0, rank).to(mesh.device_type)
            )  # FSDP2 moves inputs only in a forward that it believes to be new
        assert how == "parametrize" or mix.weight is held


def test_pruning_before_dedication_trains(mesh, rank):
    """The mask stays in force: the dedicated matrix is weight_orig."""
    torch.manual_seed(0)
    model = small().to(mesh.device_type)
    prune.random_unstructured(model.layers[0].mix, "weight", amount=0.5)
    dmuon.dedicate_params(model, mesh, lambda n, p: p.ndim == 2 and "layers" in n)
    assert "layers.0.mix.weight_orig" in {param.name for param in dmuon.get_dedicated_params(model)}
    loss_of(model, batch(0, rank).to(mesh.device_type)).backward()


@pytest.mark.parametrize("part", ["model", "layer", "linear"])
def test_another_dtype_is_refused_before_anything_changes(mesh, rank, part):
    model, _, _ = Setup(make=small).build(mesh)
    module = {"model": model, "layer": model.layers[1], "linear": model.layers[1].mix}[part]
    before = {n: (id(p), p.dtype) for n, p in model.named_parameters()}
    with pytest.raises(ValueError, match=r"layers\.\d\.mix\.weight.*cannot become torch\.bfloat16; nothing"):
        module.to(torch.bfloat16)
    assert {n: (id(p), p.dtype) for n, p in model.named_parameters()} == before
    loss_of(model.to(mesh.device_type), batch(0, rank)).backward()


@pytest.mark.parametrize("copier", [copy.deepcopy, copy.copy, pickle.dumps], ids=["deepcopy", "copy", "pickle"])
@pytest.mark.parametrize("part", ["model", "layer"])
def test_copies_are_refused(mesh, copier, part):
    model = small()
    dmuon.dedicate_params(model, mesh, lambda n, p: p.ndim == 2 and "layers" in n)
    with pytest.raises(TypeError, match="cannot be copied or pickled.*before dedicate_params"):
        copier(model if part == "model" else model.layers[0])


def test_a_deleted_model_is_freed_at_once(mesh, rank):
    """No reference cycle keeps its buffers (FSDP2 makes cycles of its own, so without it)."""
    gc.collect()
    gc.disable()
    try:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
        dmuon.dedicate_params(model, mesh, lambda n, p: True)
        optimizer = dmuon.Muon(model)
        model(torch.ones(1, 6, device=mesh.device_type)).sum().backward()
        optimizer.step()
        leaves = [weakref.ref(leaf) for leaf in model._dmuon.unsharded]
        masters = [weakref.ref(param.parameter) for param in dmuon.get_dedicated_params(model)]
        del model, optimizer
        assert all(leaf() is None for leaf in leaves + masters)
    finally:
        gc.enable()


def test_a_step_without_backward_is_reported(mesh, rank):
    model, optimizer, _ = Setup(make=small).build(mesh)
    loss_of(model, batch(0, rank)).backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.warns(RuntimeWarning, match="without a backward since the last one"):
        optimizer.step()


def test_freezing_different_matrices_on_each_rank_is_refused(mesh, rank, world_size):
    if world_size == 1:
        pytest.skip("needs two ranks to differ")
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(6, 6, bias=False) for _ in range(4)])
    dmuon.dedicate_params(model, mesh, lambda n, p: True, hook_boundary_predicate=lambda m: m is model)
    model[rank % 4].weight.requires_grad_(False)
    with pytest.raises(
        RuntimeError, match="requires_grad of matrices of group '' was changed, and not in the same way"
    ):
        model(torch.ones(1, 6, device=mesh.device_type)).sum().backward()
