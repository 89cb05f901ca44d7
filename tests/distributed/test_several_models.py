"""More than one dedicated model in a process, one inside another, and weights that are used in several places."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from reference import MuonSettings, Reference, TinyModel, batch, loss_of
from setup import full_values, step_both
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon

pytestmark = pytest.mark.ranks(2)

SETTINGS = MuonSettings()


def matrices(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim == 2 and "layers" in name


def muon(model: nn.Module) -> dmuon.Muon:
    return dmuon.Muon(model, lr=SETTINGS.lr, weight_decay=SETTINGS.weight_decay, adamw_lr=SETTINGS.adamw_lr)


def build(mesh, z3: bool, seed: int) -> tuple[nn.Module, dmuon.Muon, Reference]:
    torch.manual_seed(seed)
    model = TinyModel(dim=16, hidden=24, layers=2)
    reference = Reference(copy.deepcopy(model).to(mesh.device_type), SETTINGS)
    dmuon.dedicate_params(model, mesh, matrices, reshard_after_forward=z3)
    fully_shard(model, mesh=mesh, reshard_after_forward=z3)
    return model, muon(model), reference


@pytest.mark.parametrize("z3", [True, False], ids=["z3", "z2"])
def test_generator_and_discriminator(mesh, rank, world_size, z3):
    """Two models, one graph through both, two optimizers in turn."""
    first, first_optimizer, first_reference = build(mesh, z3, 0)
    second, second_optimizer, second_reference = build(mesh, z3, 1)

    def joint(one, two, tokens):
        hidden = one(tokens[:, :-1])
        return (hidden - two(tokens[:, 1:])).pow(2).mean()

    for _ in range(2):
        joint(first, second, batch(0, rank)).backward()
        for r in range(world_size):
            (joint(first_reference, second_reference, batch(0, r)) / world_size).backward()
        step_both(mesh, first, first_optimizer, first_reference)
        second_optimizer.zero_grad()
        second_reference.zero_grad()
        loss_of(second, batch(1, rank)).backward()
        second_reference.backward([loss_of(second_reference, batch(1, r)) for r in range(world_size)], world_size)
        step_both(mesh, second, second_optimizer, second_reference)


@pytest.mark.parametrize("z3", [True, False], ids=["z3", "z2"])
def test_teacher_and_student(mesh, rank, world_size, z3):
    teacher, _, teacher_reference = build(mesh, z3, 0)
    student, optimizer, reference = build(mesh, z3, 1)
    for step in range(2):

        def loss(of, by, tokens):
            with torch.no_grad():
                target = by(tokens)
            return (of(tokens) - target).pow(2).mean()

        loss(student, teacher, batch(step, rank)).backward()
        losses = [loss(reference, teacher_reference, batch(step, r)) for r in range(world_size)]
        reference.backward(losses, world_size)
        step_both(mesh, student, optimizer, reference)
    assert all(param._reduced_grad is None for param in dmuon.get_dedicated_params(teacher))


class Outer(nn.Module):
    """A dedicated encoder inside a model with layers of its own, as vision-language models are."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = TinyModel(dim=16, hidden=24, layers=2)
        self.project = nn.Linear(61, 16)
        self.layers = nn.ModuleList([nn.Linear(16, 16, bias=False) for _ in range(2)])
        self.head = nn.Linear(16, 61)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.project(self.encoder(tokens))
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


@pytest.mark.parametrize("z3", [True, False], ids=["z3", "z2"])
@pytest.mark.parametrize("inner_first", [True, False], ids=["inner first", "outer first"])
def test_one_dedicated_model_inside_another(mesh, rank, world_size, z3, inner_first):
    """Two dedications, one optimizer, one norm."""
    torch.manual_seed(0)
    model = Outer()
    reference = Reference(copy.deepcopy(model).to(mesh.device_type), SETTINGS)

    def inner() -> None:
        dmuon.dedicate_params(model.encoder, mesh, matrices, reshard_after_forward=z3)

    def outer() -> None:
        dmuon.dedicate_params(model, mesh, lambda n, p: matrices(n, p) and "encoder" not in n, reshard_after_forward=z3)

    for dedicate in (inner, outer) if inner_first else (outer, inner):
        dedicate()
    fully_shard(model.encoder, mesh=mesh, reshard_after_forward=z3)
    fully_shard(model, mesh=mesh, reshard_after_forward=z3)
    optimizer = muon(model)
    for step in range(2):
        loss_of(model, batch(step, rank)).backward()
        reference.backward([loss_of(reference, batch(step, r)) for r in range(world_size)], world_size)
        expected = torch.nn.utils.clip_grad_norm_(reference.model.parameters(), 0.1)
        torch.testing.assert_close(dmuon.clip_grad_norm_(model, 0.1), expected, rtol=1e-5, atol=0.0)
        step_both(mesh, model, optimizer, reference)


def test_two_dedications_share_a_module(mesh, rank):
    """Their placeholders stay on the meta device when the module moves."""
    module = nn.Module()
    module.a, module.b = nn.Parameter(torch.ones(6, 6)), nn.Parameter(torch.ones(6, 6))
    for name in ("a", "b"):
        dmuon.dedicate_params(module, mesh, lambda n, p, name=name: n == name)
    module.to(mesh.device_type)
    for name in ("a", "b"):
        assert getattr(module, name).is_meta == (rank != 0)


class Tied(nn.Module):
    """One matrix inside a layer twice, one in two layers, and an embedding tied to the head (left to FSDP2)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 16)
        self.layers = nn.ModuleList([nn.ModuleDict({k: nn.Linear(16, 16, bias=False) for k in "abc"}) for _ in "012"])
        for layer in self.layers:
            layer["b"].weight = layer["a"].weight
            layer.forward = lambda x, layer=layer: x + layer["c"](torch.tanh(layer["b"](torch.relu(layer["a"](x)))))
        self.layers[2]["c"].weight = self.layers[0]["c"].weight
        self.head = nn.Linear(16, 61, bias=False)
        self.head.weight = self.embedding.weight

    def __deepcopy__(self, memo):
        other = Tied()
        other.load_state_dict(self.state_dict())
        return other

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize("z3", [True, False], ids=["z3", "z2"])
def test_tied_weights(mesh, rank, world_size, z3):
    torch.manual_seed(0)
    model = Tied()
    reference = Reference(copy.deepcopy(model).to(mesh.device_type), SETTINGS)
    dmuon.dedicate_params(model, mesh, matrices, reshard_after_forward=z3)
    assert len(dmuon.get_dedicated_params(model)) == 5
    fully_shard(model, mesh=mesh, reshard_after_forward=z3)
    optimizer = muon(model)
    for step in range(3):
        loss_of(model, batch(step, rank)).backward()
        reference.backward([loss_of(reference, batch(step, r)) for r in range(world_size)], world_size)
        step_both(mesh, model, optimizer, reference)
    assert set(full_values(model)) <= {name for name, _ in model.named_parameters()}


@pytest.mark.ranks(4)
def test_stages_on_disjoint_meshes(mesh, rank, world_size):
    """As in pipeline parallelism: each half of the ranks has a model and a mesh of its own, with other sizes."""
    if world_size != 4:
        pytest.skip("needs two meshes of two ranks")
    stages = init_device_mesh(mesh.device_type, (2, 2), mesh_dim_names=("stage", "shard"))
    stage, place = divmod(rank, 2)
    torch.manual_seed(stage)
    model = TinyModel(dim=16, hidden=24, layers=2 + stage)
    reference = Reference(copy.deepcopy(model).to(mesh.device_type), SETTINGS)
    half = stages["shard"]
    for _ in range(1 + stage):  # one stage dedicates more models than the other
        extra = TinyModel(dim=16, hidden=24, layers=1)
        dmuon.dedicate_params(extra, half, matrices)
    dmuon.dedicate_params(model, half, matrices)
    fully_shard(model, mesh=half)
    optimizer = muon(model)
    for step in range(2):
        loss_of(model, batch(step, place)).backward()
        reference.backward([loss_of(reference, batch(step, r)) for r in range(2)], 2)
        step_both(mesh, model, optimizer, reference)


def test_ranks_that_are_in_different_numbers_of_groups(mesh, rank, world_size):
    """torch names a group by how many its maker is in already; the ranks of a mesh must still meet."""
    for _ in range(2 - rank):
        dist.new_group([rank], use_local_synchronization=True)
    again = DeviceMesh(mesh.device_type, list(range(world_size)), mesh_dim_names=("shard",))
    model, optimizer, reference = build(again, True, 5)
    loss_of(model, batch(0, rank)).backward()
    reference.backward([loss_of(reference, batch(0, r)) for r in range(world_size)], world_size)
    step_both(again, model, optimizer, reference)
