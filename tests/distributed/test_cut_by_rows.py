"""Large elementwise parameters, of which every rank owns some rows: what users see of them, and what they do with it.
That they train like one process is in test_elementwise.py.
"""

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from elementwise import Transformer
from reference import VOCAB, TinyModel, batch, is_matrix, loss_of
from setup import Setup, assert_same, full_values, gathered, step_both
from test_elementwise import recipe_c, step_and_align
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import dmuon
from dmuon import _cut

pytestmark = pytest.mark.ranks(2, 3)


def cut_ones(model: nn.Module) -> dict[str, dmuon.DedicatedParam]:
    return {param.name: param for param in dmuon.get_dedicated_params(model) if param.owner_rank is None}


@pytest.mark.ranks(1, 2, 3, 4)
def test_they_are_what_fsdp2_would_make(mesh, world_size):
    model, _, _ = recipe_c().build(mesh)
    theirs = Transformer().to(mesh.device_type)
    fully_shard(theirs, mesh=mesh)
    cut = cut_ones(model)
    assert set(cut) == (set() if world_size == 1 else {"embedding.weight", "head.weight"})
    for name, param in cut.items():
        ours, expected = param.parameter, theirs.get_parameter(name)
        assert isinstance(ours, nn.Parameter) and ours is model.get_parameter(name)
        assert (ours.shape, ours.stride(), ours.dtype) == (expected.shape, expected.stride(), expected.dtype)
        assert (ours.device_mesh, ours.placements) == (expected.device_mesh, expected.placements)
        assert ours.to_local().shape == expected.to_local().shape


@pytest.mark.ranks(4)
def test_rows_that_do_not_go_round(mesh, rank, world_size):
    """5 rows over 4 ranks: 2, 2, 1 and none."""

    def make() -> TinyModel:
        model = TinyModel()
        model.head = nn.Linear(24, 5)
        return model

    setup = recipe_c(make=make, cut_elements=100)
    model, optimizer, reference = setup.build(mesh)
    head = cut_ones(model)["head.weight"]
    assert head.parameter.to_local().shape[0] == [2, 2, 1, 0][rank] and head.is_owner == (rank < 3)
    calls = []
    model.head.weight.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad.to_local().shape[0]))
    for step in range(3):
        tokens = [batch(step, r) % 5 for r in range(world_size)]
        loss_of(model, tokens[rank]).backward()
        reference.backward([loss_of(reference, each) for each in tokens], world_size)
        assert calls == [[2, 2, 1, 0][rank]] * (step + 1)
        step_both(mesh, model, optimizer, reference)
        assert optimizer.state[model.head.weight]["step"] == step + 1


@pytest.mark.ranks(4)
def test_meshes_that_were_made_apart(mesh, rank, world_size):
    """Of two 1-D meshes dmuon makes the mesh of both itself."""
    axes = init_device_mesh(mesh.device_type, (2, 2), mesh_dim_names=("replicate", "shard"))
    groups = {name: axes[name].get_group() for name in ("replicate", "shard")}
    apart = {n: torch.distributed.DeviceMesh.from_group(group, mesh.device_type) for n, group in groups.items()}
    torch.manual_seed(0)
    model = Transformer().to(mesh.device_type)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    with mock.patch.object(_cut, "LEAST_ELEMENTS", 200):
        dmuon.dedicate_params(
            model, apart["shard"], is_matrix, replicate_mesh=apart["replicate"], elementwise=lambda n, p: True
        )
    for name, param in cut_ones(model).items():
        assert param.parameter.device_mesh.shape == (2, 2) and param._handle.owner() == (rank % 2, rank // 2)
        assert torch.equal(gathered(param.parameter), expected[name])
    loss_of(model, batch(0, rank)).backward()
    dmuon.Muon(model).step()
    dmuon.check_invariants(model)
    state = model.state_dict()
    assert torch.equal(gathered(state["head.weight"]), gathered(model.head.weight))


@pytest.mark.parametrize("reproducible", [False, True], ids=["", "reproducible"])
def test_gradients_that_users_change(mesh, rank, world_size, reproducible):
    """Between backwards: added to, scaled in place, replaced, dropped.  Hooks see what is there."""
    torch.manual_seed(0)
    model = Transformer().to(mesh.device_type)
    with mock.patch.object(_cut, "LEAST_ELEMENTS", 200):
        dmuon.dedicate_params(model, mesh, is_matrix, elementwise=lambda n, p: True, reproducible=reproducible)
    weight = model.head.weight
    seen = []
    weight.register_post_accumulate_grad_hook(lambda p: seen.append((p is weight, gathered(p.grad))))

    def backward(step: int) -> None:
        loss_of(model, batch(step, rank)).backward()

    alone = []
    for step in range(3):
        backward(step)
        alone.append(gathered(weight.grad))
        weight.grad = None
        model.zero_grad()
    assert all(same and torch.equal(grad, expected) for (same, grad), expected in zip(seen, alone, strict=True))
    backward(0)
    with torch.no_grad():
        weight.grad.mul_(0.5)
    backward(1)
    weight.grad = weight.grad * 3.0
    backward(2)
    expected = (alone[0] * 0.5 + alone[1]) * 3.0 + alone[2]
    torch.testing.assert_close(gathered(weight.grad), expected, rtol=1e-6, atol=1e-7)
    assert len(seen) == 6 and torch.equal(seen[-1][1], gathered(weight.grad))
    weight.grad = None
    backward(0)
    assert torch.equal(gathered(weight.grad), alone[0])
    assert all(param._handle.registered().grad is None for param in cut_ones(model).values())  # nothing kept alive


def test_a_model_on_the_meta_device(mesh, rank, world_size):
    """Rows become real with to_empty, are initialised as a DTensor, and train."""
    torch.manual_seed(0)
    plain = Transformer()
    with torch.device("meta"):
        model = Transformer()
    with mock.patch.object(_cut, "LEAST_ELEMENTS", 200):
        dmuon.dedicate_params(model, mesh, is_matrix, elementwise=lambda n, p: True)
    assert model.head.weight.is_meta and isinstance(model.head.weight, DTensor)
    model.to_empty(device=mesh.device_type)
    model.load_state_dict(plain.state_dict())
    plain.to(mesh.device_type)
    for name, value in full_values(model).items():
        assert torch.equal(value, plain.get_parameter(name)), name
    nn.init.constant_(model.head.weight, 0.25)
    assert gathered(model.head.weight).eq(0.25).all()
    optimizer = dmuon.Muon(model)
    loss_of(model, batch(0, rank)).backward()
    optimizer.step()
    assert not gathered(model.head.weight).eq(0.25).any()


def test_moving_keeps_values_and_gradients(mesh, rank, world_size):
    model, optimizer, reference = recipe_c().build(mesh)
    loss_of(model, batch(0, rank)).backward()
    before = model.head.weight
    model.to(mesh.device_type)
    assert model.head.weight is before
    model._apply(lambda t: t.clone())
    assert model.head.weight is not before and model.head.weight is cut_ones(model)["head.weight"].parameter
    reference.backward([loss_of(reference, batch(0, r)) for r in range(world_size)], world_size)
    assert_same(model, reference, 1e-5, grads=True)
    assert_same(model, reference, 0.0)
    with pytest.raises(ValueError, match="cannot become torch.float64"):
        model.double()


def test_rows_put_in_by_hand_are_an_error(mesh, rank):
    model, _, _ = recipe_c().build(mesh)
    model.head.weight._local_tensor = model.head.weight._local_tensor.clone()
    with pytest.raises(RuntimeError, match=r"'head\.weight' was replaced after dedicate_params"):
        model(batch(0, rank)[:, :-1])


def test_values_copied_in_are_used(mesh, rank):
    """`copy_` on the DTensor, and on its local rows."""
    model, _, reference = recipe_c().build(mesh)
    with torch.no_grad():
        for each in (model, reference.model):
            each.head.weight.copy_(each.head.weight * 1.5)
        model.embedding.weight.to_local().mul_(0.5)
        reference.model.embedding.weight.mul_(0.5)
        tokens = batch(0, rank)[:, :-1]
        torch.testing.assert_close(model(tokens), reference.model(tokens.to(mesh.device_type)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("first", ["dedicate", "shard"])
def test_beside_fully_shard(mesh, rank, world_size, first):
    """dmuon takes matrices and the large ones, FSDP2 the norms and biases."""
    torch.manual_seed(0)
    model = Transformer()
    setup = Setup(make=lambda: copy.deepcopy(model))
    _, _, reference = setup.build(mesh)
    with mock.patch.object(_cut, "LEAST_ELEMENTS", 200):
        large = {"embedding.weight", "head.weight"}
        dmuon.dedicate_params(model, mesh, is_matrix, elementwise=lambda n, p: n in large)
    if first == "shard":
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert set(cut_ones(model)) == large and model.head.weight.shape == (VOCAB, 20)
    s = setup.settings
    optimizer = dmuon.Muon(
        model, lr=s.lr, momentum=s.momentum, weight_decay=s.weight_decay, nesterov=s.nesterov, adamw_lr=s.adamw_lr
    )
    for step in range(3):
        loss_of(model, batch(step, rank)).backward()
        reference.backward([loss_of(reference, batch(step, r)) for r in range(world_size)], world_size)
        step_and_align(mesh, model, optimizer, reference)


def test_the_plan_counts_rows(mesh, world_size):
    """State is spread evenly, to a row."""
    model, optimizer, _ = recipe_c().build(mesh)
    loads = [load[1] for load in model._dmuon.plan.loads()]
    with mock.patch.object(_cut, "LEAST_ELEMENTS", VOCAB * 20):
        cut = _cut.PlanRows([("e", VOCAB, 20, "", True), ("f", VOCAB - 1, 20, "", True)], world_size, 1)
    assert [len(places) for places in cut.places] == [world_size, 1]
    heights = [last - first for first, last in map(cut.part, cut.places[0])]
    assert sum(heights) == VOCAB and max(heights) - min(heights) < world_size
    elements = {p.name: p.parameter.numel() * (12 if p.elementwise else 8) for p in dmuon.get_dedicated_params(model)}
    assert sum(loads) == sum(elements.values())
    state = optimizer.state[model.head.weight]
    assert state["exp_avg"].shape == model.head.weight.to_local().shape
    counts = torch.tensor([state["exp_avg"].numel() + state["exp_avg_sq"].numel()])
    dist.all_reduce(counts)
    assert counts.item() == 2 * VOCAB * 20
