"""Recipe c: dmuon carries all parameters, without fully_shard.  Against one process in plain torch."""

import random

import pytest
import torch
import torch.nn as nn
from elementwise import Transformer
from reference import MuonSettings, Reference, TinyModel, batch, is_matrix, loss_of
from setup import Setup, align, assert_same, check_invariants, full_values, mesh_of, step_both, update_tolerance
from test_loops import LOOPS, LoopModel, run
from test_parity import train

import dmuon

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

BF16 = torch.bfloat16


def recipe_c(**options) -> Setup:
    return Setup(recipe="c", **({"make": Transformer} | options))


@pytest.mark.parametrize("z3", [True, False], ids=["z3", "z2"])
@pytest.mark.parametrize("dtype", [None, BF16], ids=["fp32", "bf16"])
def test_equals_one_process(mesh, rank, world_size, z3, dtype):
    train(recipe_c(z3=z3, dtype=dtype), mesh, rank, world_size, amplifies=True)


@pytest.mark.parametrize("z3", [True, False], ids=["z3", "z2"])
@pytest.mark.parametrize("dtype", [None, BF16], ids=["fp32", "bf16"])
def test_the_model_of_the_other_recipes(mesh, rank, world_size, z3, dtype):
    train(recipe_c(z3=z3, dtype=dtype, make=TinyModel), mesh, rank, world_size)


@pytest.mark.parametrize("z3", [True, False], ids=["z3", "z2"])
def test_tied_embedding_and_head(mesh, rank, world_size, z3):
    setup = recipe_c(z3=z3, make=lambda: Transformer(tied=True))
    train(setup, mesh, rank, world_size, amplifies=True)
    model, _, _ = setup.build(mesh)
    assert model.embedding.weight is model.head.weight
    assert sum(p.name == "embedding.weight" for p in dmuon.get_dedicated_params(model)) == 1


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("z3", [True, False], ids=["z3", "z2"])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_loop(mesh, rank, world_size, z3, loop):
    run(mesh, rank, world_size, recipe_c(z3=z3, make=LoopModel), loop)


def step_and_align(mesh, model: nn.Module, optimizer: dmuon.Muon, reference: Reference) -> None:
    """Attention amplifies rounding: every step begins from the same values."""
    step_both(mesh, model, optimizer, reference)
    align(model, reference)


def everything_at_once(setup: Setup, mesh, rank: int, world_size: int) -> None:
    """Two micro-batches, clipping, a scheduler; the global norm is that of one process."""
    model, optimizer, reference = setup.build(mesh)
    schedule = [1.0, 0.5, 0.25, 0.125]
    ours = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule[step])
    for step in range(3):
        with dmuon.no_sync(model):
            loss_of(model, batch(10 * step, rank)).backward()
        loss_of(model, batch(10 * step + 1, rank)).backward()
        for i in range(2):
            losses = [loss_of(reference, batch(10 * step + i, r)) for r in range(world_size)]
            reference.backward(losses, world_size)
        assert_same(model, reference, 1e-5, grads=True)
        expected = torch.nn.utils.clip_grad_norm_(reference.model.parameters(), 0.3)
        total = dmuon.clip_grad_norm_(model if step else optimizer, 0.3)
        torch.testing.assert_close(total.cpu(), expected.cpu(), rtol=1e-5, atol=0.0)
        step_and_align(mesh, model, optimizer, reference)
        ours.step()
        reference.settings.lr = MuonSettings().lr * schedule[step + 1]
        for group in reference.adamw.param_groups:
            group["lr"] = MuonSettings().adamw_lr * schedule[step + 1]


@pytest.mark.parametrize("z3", [True, False], ids=["z3", "z2"])
def test_accumulation_clipping_and_a_scheduler(mesh, rank, world_size, z3):
    everything_at_once(recipe_c(z3=z3, settings=MuonSettings()), mesh, rank, world_size)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("replicate_async", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("dtype", [None, BF16], ids=["fp32", "bf16"])
def test_replicas(mesh_2d, rank, world_size, replicate_async, dtype):
    setup = recipe_c(z3=replicate_async, dtype=dtype, replicate_async=replicate_async)
    train(setup, mesh_2d, rank, world_size, amplifies=True)
    everything_at_once(recipe_c(dtype=dtype, replicate_async=replicate_async), mesh_2d, rank, world_size)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("dtype", [None, BF16], ids=["fp32", "bf16"])
def test_async_equals_sync_bit_for_bit(mesh_2d, rank, dtype):
    results = []
    for replicate_async in (True, False):
        model, optimizer, _ = recipe_c(dtype=dtype, replicate_async=replicate_async).build(mesh_2d)
        losses = []
        for step in range(6):
            loss = loss_of(model, batch(step, rank))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            with torch.no_grad():
                losses.append(loss_of(model, batch(step + 50, rank)).item())
        check_invariants(model)
        state = [p._owned_data for p in dmuon.get_dedicated_params(model) if p._owned_data is not None]
        state += [v for values in optimizer.state.values() for v in values.values() if not v.is_meta]
        results.append((losses, [t.clone() for t in state]))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


def test_no_fully_shard_and_one_owner_each(mesh, world_size):
    """Every parameter has one owner, and small ones travel with the group of their layer or of the root."""
    model, optimizer, _ = recipe_c(cut_elements=1 << 40).build(mesh)
    assert [group.name for group in model._dmuon.groups] == ["", "layers.0", "layers.1"]
    assert len(dmuon.get_dedicated_params(model)) == len(list(model.parameters()))
    kinds = {param.name: param.elementwise for param in dmuon.get_dedicated_params(model)}
    assert kinds == {n: not is_matrix(n, p) for n, p in Transformer().named_parameters()}
    assert [group["name"] for group in optimizer.param_groups] == ["default/muon", "default/adamw"]
    owners = {owner for owner in model._dmuon.plan.owners()}
    assert len(owners) == min(world_size, 6)
    assert all(p.is_meta != param.is_owner for param in dmuon.get_dedicated_params(model) for p in [param.parameter])
    loads = model._dmuon.plan.loads()
    elements = {p.name: p.parameter.numel() * (12 if p.elementwise else 8) for p in dmuon.get_dedicated_params(model)}
    assert sum(load[1] for load in loads) == sum(elements.values())


def test_large_ones_have_groups_of_their_own(mesh):
    model = Transformer()
    model.embedding = nn.Embedding(8192, 8)
    model.head = nn.Linear(8, 8193)
    dmuon.dedicate_params(model.to(mesh.device_type), mesh, is_matrix, elementwise=lambda name, p: True)
    groups = {group.name: {param.name for param in group.params} for group in model._dmuon.groups}
    assert list(groups) == ["", "embedding", "layers.0", "layers.1", "head"]
    assert groups[""] == {"position", "norm.weight", "norm.bias", "head.bias"}
    assert groups["embedding"] == {"embedding.weight"} and groups["head"] == {"head.weight"}


def bytes_of_moments(optimizer: dmuon.Muon) -> int:
    """Momentum and AdamW's moments that this rank holds."""
    values = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    return sum(value.nbytes for value in values if not value.is_meta)


@pytest.mark.parametrize("z3", [True, False], ids=["z3", "z2"])
@pytest.mark.parametrize("dtype", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("cut", [1 << 17, 1 << 40], ids=["cut", "whole"])
def test_bytes_and_memory_are_those_of_the_formulas(mesh, rank, world_size, z3, dtype, cut):
    def make() -> TinyModel:  # no padding on the wire, and large enough for groups of their own
        model = TinyModel(dim=32, hidden=64, layers=4)
        model.embedding = nn.Embedding(4096, 32)
        model.head = nn.Linear(32, 4096, bias=False)
        return model

    model, optimizer, _ = recipe_c(z3=z3, dtype=dtype, make=make, cut_elements=cut).build(mesh)

    def step() -> None:
        loss_of(model, batch(7, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    dmuon.comm_stats(model, reset=True)
    dmuon.memory_report(model, track=True)
    step()
    stats, elements = dmuon.comm_stats(model), sum(p.numel() for p in model.parameters())
    counts = torch.tensor([stats.broadcast_bytes, stats.reduce_bytes])
    torch.distributed.all_reduce(counts)
    gathers = 2 if z3 else 1
    from_peers = model._dmuon.comms[1].copies_from_peers()  # gradients travel in their own dtype then
    assert counts.tolist() == [
        gathers * (world_size - 1) * elements * (2 if dtype else 4),
        (world_size - 1) * elements * (2 if dtype and from_peers else 4),
    ]
    if world_size > 1:
        assert (stats.broadcast_calls, stats.reduce_calls) == (gathers * 6, 6)
    report = dmuon.memory_report(model)
    moments = bytes_of_moments(optimizer)
    assert moments == report.predicted_momentum
    assert report.live + moments == report.predicted_resident
    predicted = max(report.predicted_forward_peak, report.predicted_backward_peak)
    assert abs(report.peak + moments - predicted) <= 0.02 * predicted, f"{report}"


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("z3", [True, False], ids=["z3", "z2"])
def test_frozen_and_unfrozen(mesh, rank, world_size, z3):
    """The embedding and a norm are frozen at first; then they change places with the head."""

    def make() -> Transformer:
        model = Transformer()
        model.embedding.requires_grad_(False)
        model.layers[0].norm.requires_grad_(False)
        return model

    model, optimizer, reference = recipe_c(z3=z3, make=make).build(mesh)
    frozen = {n: v.clone() for n, v in full_values(model).items() if n.startswith(("embedding", "layers.0.norm."))}
    for step in range(4):
        if step == 2:
            values = full_values(model)  # collective
            assert all(torch.equal(values[name], value) for name, value in frozen.items())
            for each in (model, reference.model):
                each.embedding.requires_grad_(True)
                each.head.requires_grad_(False)
        loss_of(model, batch(step, rank)).backward()
        reference.backward([loss_of(reference, batch(step, r)) for r in range(world_size)], world_size)
        check_invariants(model)
        step_and_align(mesh, model, optimizer, reference)


@pytest.mark.ranks(2, 3)
def test_grad_scaler(mesh, rank, world_size):
    """One rank's loss is infinite in the second step: no rank steps any parameter."""
    model, optimizer, reference = recipe_c().build(mesh)
    scaler = dmuon.GradScaler(mesh.device_type, init_scale=2.0**8)
    for step in range(3):
        loss = loss_of(model, batch(step, rank))
        broken = step == 1
        scaler.scale(loss * float("inf") if broken and rank == world_size - 1 else loss).backward()
        scaler.unscale_(optimizer)
        dmuon.clip_grad_norm_(optimizer, 0.5)
        scaler.step(optimizer)
        scaler.update()
        if not broken:
            reference.backward([loss_of(reference, batch(step, r)) for r in range(world_size)], world_size)
            torch.nn.utils.clip_grad_norm_(reference.model.parameters(), 0.5)
            reference.step()
        assert_same(model, reference, update_tolerance(mesh, 5e-6))
        optimizer.zero_grad()
        reference.zero_grad()


@pytest.mark.ranks(2, 3)
def test_groups_of_parameters(mesh, rank, world_size):
    """No weight decay and another rate for what is 1-D, on elementwise parameters as on FSDP2's; one is added later."""
    model, _, reference = recipe_c().build(mesh)
    matrices, vectors, rest = [], [], []
    for n, p in reference.model.named_parameters():
        (matrices if is_matrix(n, p) else vectors if p.ndim == 1 else rest).append(n)
    ours, theirs = dict(model.named_parameters()), dict(reference.model.named_parameters())
    settings = reference.settings
    optimizer = dmuon.Muon(
        model,
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        adamw_lr=settings.adamw_lr,
        param_groups=[
            {"params": [ours[n] for n in vectors], "adamw_lr": 3e-3, "adamw_weight_decay": 0.0, "name": "vectors"},
            {"params": [ours[n] for n in matrices + rest]},
        ],
    )
    reference.adamw = torch.optim.AdamW(
        [
            {"params": [theirs[n] for n in vectors], "lr": 3e-3, "weight_decay": 0.0},
            {"params": [theirs[n] for n in rest], "lr": settings.adamw_lr, "weight_decay": 0.01},
        ],
        foreach=True,
    )
    assert [group["name"] for group in optimizer.param_groups] == ["vectors/adamw", "default/muon", "default/adamw"]
    for step in range(3):
        loss_of(model, batch(step, rank)).backward()
        reference.backward([loss_of(reference, batch(step, r)) for r in range(world_size)], world_size)
        step_and_align(mesh, model, optimizer, reference)
    with pytest.raises(ValueError, match="in param_groups more than once"):
        optimizer.add_param_group({"params": [ours["norm.weight"]]})


class Piece(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh((self.weight * x).mean() + 0.1 * self.weight.square().mean())


class Pieces(nn.Module):
    """Parameters of random shapes, some in module lists, some not; `chosen` ones are used."""

    def __init__(self, shapes: list[tuple[int, ...]], seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        half = len(shapes) // 2
        self.layers = nn.ModuleList([Piece(shape) for shape in shapes[:half]])
        self.others = nn.ModuleDict({f"p{i}": Piece(shape) for i, shape in enumerate(shapes[half:])})
        self.loose = nn.ParameterList([torch.randn(3), torch.randn(2, 2, 2)])
        self.matrix = Piece((5, 4))

    def forward(self, x: torch.Tensor, chosen: set[int]) -> torch.Tensor:
        pieces = [*self.layers, *self.others.values(), self.matrix]
        total = x + self.loose[0].sum() * x + self.loose[1].prod()
        return total + sum(piece(total) for i, piece in enumerate(pieces) if i in chosen)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("seed", range(10))
def test_random_shapes_and_uses(mesh, hsdp_mesh, rank, world_size, seed):
    """1-D to 4-D, single elements, sizes that nothing divides, all cut or some or none; each rank uses some of them."""
    dice = random.Random(seed)
    shapes = [tuple(dice.randint(1, 7) for _ in range(dice.randint(1, 4))) for _ in range(dice.randint(2, 8))]
    uses = [[{i for i in range(len(shapes) + 1) if dice.random() < 0.8} for _ in range(world_size)] for _ in range(4)]
    chosen_mesh = dice.choice([mesh, hsdp_mesh] if world_size != 3 else [mesh])
    setup = recipe_c(
        z3=dice.random() < 0.5,
        cut_elements=dice.choice([1, 20, 1 << 40]),
        make=lambda: Pieces(shapes, seed),
        predicate=lambda name, p: name == "matrix.weight" or ("layers" in name and p.ndim == 2),
    )
    model, optimizer, reference = setup.build(chosen_mesh)

    def loss(call, step: int, r: int) -> torch.Tensor:
        x = torch.tensor(0.3 + 0.1 * step + 0.05 * r, device=mesh.device_type, requires_grad=True)
        return call(x, uses[step][r]).pow(2)

    for step in range(4):
        loss(model, step, rank).backward()
        reference.backward([loss(reference, step, r) for r in range(world_size)], world_size)
        check_invariants(model)
        step_and_align(mesh, model, optimizer, reference)


@pytest.mark.ranks(4)
def test_reproducible_runs_do_not_see_the_mesh(mesh, mesh_2d, rank, world_size):
    """Four ranks on one axis or on two: the same bits of all parameters."""
    results = []
    for chosen in (mesh, mesh_2d):
        torch.manual_seed(0)
        model = Transformer().to(mesh.device_type)
        two = chosen.ndim == 2
        dmuon.dedicate_params(
            model,
            chosen.axes["shard"] if two else chosen,
            is_matrix,
            replicate_mesh=chosen.axes["replicate"] if two else None,
            reproducible=True,
            elementwise=lambda name, p: True,
        )
        optimizer = dmuon.Muon(model, lr=0.005)
        for step in range(3):
            loss_of(model, batch(step, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        settings = MuonSettings()
        align(model, reference := Reference(Transformer().to(mesh.device_type), settings))
        results.append({n: p.detach().clone() for n, p in reference.model.named_parameters()})
        assert mesh_of(model)[0] * mesh_of(model)[1] == world_size
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


@pytest.mark.ranks(2)
def test_beside_fsdp2(mesh, rank, world_size):
    """Only norms and biases are elementwise; embedding and head stay with fully_shard."""
    from torch.distributed.fsdp import fully_shard

    settings = MuonSettings()
    torch.manual_seed(0)
    model = Transformer()
    reference = Reference(Transformer(), settings)
    reference.model.load_state_dict(model.state_dict())
    reference.model.to(mesh.device_type)
    dmuon.dedicate_params(model, mesh, is_matrix, elementwise=lambda n, p: "layers" in n or "norm" in n)
    fully_shard(model, mesh=mesh)
    optimizer = dmuon.Muon(
        model,
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        adamw_lr=settings.adamw_lr,
        momentum=settings.momentum,
    )
    assert [group["name"] for group in optimizer.param_groups] == ["default/muon", "default/adamw", "default/adamw"]
    for step in range(3):
        loss_of(model, batch(step, rank)).backward()
        reference.backward([loss_of(reference, batch(step, r)) for r in range(world_size)], world_size)
        expected = torch.nn.utils.clip_grad_norm_(reference.model.parameters(), 0.3)
        torch.testing.assert_close(dmuon.clip_grad_norm_(model, 0.3).cpu(), expected.cpu(), rtol=1e-5, atol=0.0)
        step_and_align(mesh, model, optimizer, reference)
