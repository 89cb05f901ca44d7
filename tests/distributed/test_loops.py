"""Training loops people write, one function each: it runs on this rank's data over the mesh, and on every rank's data
in the reference.  Three steps, so that a gradient lost in one step, or left over for the next, shows.
"""

import functools
import time
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from reference import Block, TinyModel, batch, device_of, loss_of
from setup import Setup, assert_same, check_invariants, step_both, update_tolerance
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import dmuon

pytestmark = pytest.mark.ranks(2)

STEPS = 3


class LoopModel(TinyModel):
    """Runs its layers in an order the caller chooses, and returns nested outputs if asked."""

    def __init__(self) -> None:
        super().__init__(dim=16, hidden=24, layers=4)

    def forward(self, tokens, order=(0, 1, 2, 3), nested=False, reentrant=None, contexts=None):
        x = self.embedding(tokens.to(device_of(self)))
        hidden = [x]
        extra = {"context_fn": contexts} if contexts else {}
        for index in order:
            layer = self.layers[index]
            x = layer(x) if reentrant is None else checkpoint(layer, x, use_reentrant=reentrant, **extra)
            hidden.append(x)
        logits = self.head(x)
        return {"logits": logits, "hidden": [tuple(hidden), None], "step": 3} if nested else logits


def plain(call, data) -> None:
    loss_of(call, data(0)).backward()


def two_forwards_one_backward(call, data) -> None:
    (loss_of(call, data(0)) + 0.5 * loss_of(call, data(1))).backward()


def two_micro_batches(call, data) -> None:
    loss_of(call, data(0)).backward()
    loss_of(call, data(1)).backward()


def retain_graph(call, data) -> None:
    loss = loss_of(call, data(0))
    loss.backward(retain_graph=True)
    (0.5 * loss).backward()


def layer_used_twice(call, data) -> None:
    loss_of(lambda t: call(t, order=(0, 1, 1, 2, 3, 0)), data(0)).backward()


def layer_skipped(call, data) -> None:
    loss_of(lambda t: call(t, order=(0, 2)), data(0)).backward()


def layers_in_another_order(call, data) -> None:
    loss_of(lambda t: call(t, order=(3, 1, 2, 0)), data(0)).backward()


def evaluation_between(call, data) -> None:
    loss = loss_of(call, data(0))
    with torch.no_grad():
        loss_of(call, data(1))
    with torch.inference_mode():
        loss_of(call, data(2))
    loss.backward()


def discarded_forward(call, data) -> None:
    loss_of(call, data(1))
    loss_of(call, data(0)).backward()


def nested_outputs(call, data) -> None:
    out = call(data(0)[:, :-1], nested=True)
    out["hidden"][0][-1].pow(2).mean().backward()


def unused_output(call, data) -> None:
    out = call(data(0)[:, :-1], nested=True)
    out["hidden"][0][2].pow(2).mean().backward()


def checkpoint_not_reentrant(call, data) -> None:
    loss_of(lambda t: call(t, reentrant=False), data(0)).backward()


def checkpoint_reentrant(call, data) -> None:
    loss_of(lambda t: call(t, reentrant=True), data(0)).backward()


def teacher_and_student(call, data) -> None:
    with torch.no_grad():
        target = call(data(0)[:, :-1])
    (call(data(0)[:, :-1]) - 0.9 * target).pow(2).mean().backward()


def losses_of_several_modules(call, data) -> None:
    out = call(data(0)[:, :-1], nested=True)
    (out["hidden"][0][1].pow(2).mean() + out["hidden"][0][3].mean() + out["logits"].pow(2).mean()).backward()


def losses_in_turn(call, data) -> None:
    """Two backwards through one graph that share only its beginning."""
    out = call(data(0)[:, :-1], nested=True)
    out["hidden"][0][2].pow(2).mean().backward(retain_graph=True)
    out["logits"].pow(2).mean().backward()


def checkpoint_selective(call, data) -> None:
    """Keeps what matrix products made and recomputes the rest."""

    def policy(context, op, *args, **kwargs):
        kept = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    loss_of(lambda t: call(t, reentrant=False, contexts=contexts), data(0)).backward()


LOOPS: list[Callable] = [
    plain, two_forwards_one_backward, two_micro_batches, retain_graph, layer_used_twice, layer_skipped,
    layers_in_another_order, evaluation_between, discarded_forward, nested_outputs, unused_output,
    losses_of_several_modules, losses_in_turn,
    checkpoint_not_reentrant, checkpoint_reentrant, checkpoint_selective, teacher_and_student,
]  # fmt: skip


def run(mesh, rank: int, world_size: int, setup: Setup, loop: Callable, wrap: Callable = lambda model: None) -> None:
    model, optimizer, reference = setup.build(mesh)
    wrap(model)
    for step in range(STEPS):
        loop(model, lambda i, step=step: batch(10 * step + i, rank))
        reference_step(reference, loop, step, world_size)
        check_invariants(model)
        assert {group.state for group in model._dmuon.groups} == {"sharded"}
        step_both(mesh, model, optimizer, reference)


def reference_step(reference, loop: Callable, step: int, world_size: int) -> None:
    with reference.mean_over(world_size):
        for r in range(world_size):
            loop(reference, lambda i, r=r: batch(10 * step + i, r))


@pytest.mark.parametrize("z3", [True, False], ids=["z3", "z2"])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_loop(mesh, rank, world_size, z3, loop):
    run(mesh, rank, world_size, Setup(z3=z3, make=LoopModel, recipe="b"), loop)


SYNC_TOO = [plain, layer_skipped, evaluation_between]
WITH_REPLICAS = [(loop, True) for loop in LOOPS] + [(loop, False) for loop in SYNC_TOO]


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("case", list(enumerate(WITH_REPLICAS)), ids=lambda case: f"{case[1][0].__name__}-{case[1][1]}")
def test_loop_with_replicas(hsdp_mesh, rank, world_size, case):
    """Z3 and Z2 in turn; that async and sync agree in every bit is shown elsewhere."""
    index, (loop, replicate_async) = case
    setup = Setup(z3=index % 2 == 0, make=LoopModel, recipe="b", replicate_async=replicate_async)
    run(hsdp_mesh, rank, world_size, setup, loop)


@pytest.mark.parametrize("way", ["zeroed in place", "model.zero_grad", "a bad step is skipped"])
def test_how_a_step_ends(mesh, rank, world_size, way):
    model, optimizer, reference = Setup(make=LoopModel, recipe="b").build(mesh)
    for step in range(4):
        factor = float("nan") if way == "a bad step is skipped" and step % 2 else 1.0
        order = (0, 1, 2, 3) if step % 2 else (0, 2)
        (factor * loss_of(lambda t, order=order: model(t, order=order), batch(step, rank))).backward()
        if factor == factor:
            losses = [loss_of(lambda t, o=order: reference(t, order=o), batch(step, r)) for r in range(world_size)]
            reference.backward(losses, world_size)
            optimizer.step()
            reference.step()
        assert_same(model, reference, update_tolerance(mesh, 5e-6))
        if way == "model.zero_grad":
            model.zero_grad(), reference.zero_grad()
        else:
            in_place = way == "zeroed in place"
            optimizer.zero_grad(set_to_none=not in_place), reference.model.zero_grad(set_to_none=not in_place)


class CheckpointingBlock(Block):
    """Runs its parts again in backward, where no hook of the block itself runs."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(16, 24)
        self.reentrant = reentrant

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("z3", [True, False], ids=["z3", "z2"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not_reentrant"])
@pytest.mark.parametrize(
    "loop",
    [plain, two_forwards_one_backward, layer_used_twice, checkpoint_not_reentrant, checkpoint_reentrant],
    ids=lambda loop: loop.__name__,
)
def test_checkpoint_inside_a_layer(mesh, rank, world_size, z3, reentrant, loop):
    def make() -> nn.Module:
        model = LoopModel()
        model.layers = nn.ModuleList([CheckpointingBlock(reentrant) for _ in range(4)])
        return model

    run(mesh, rank, world_size, Setup(z3=z3, make=make, recipe="b"), loop)


@pytest.mark.parametrize("z3", [True, False], ids=["z3", "z2"])
def test_compiled_layers(mesh, rank, world_size, z3):
    """Layers compiled in place before wrapping; the hooks stay outside the compiled code."""

    class Compiled(LoopModel):
        def __init__(self) -> None:
            super().__init__()
            for layer in self.layers:
                layer.forward = torch.compile(layer.forward, backend="aot_eager")

        def __deepcopy__(self, memo):
            plain = LoopModel()
            plain.load_state_dict(self.state_dict())
            return plain

    run(mesh, rank, world_size, Setup(z3=z3, make=Compiled, recipe="b"), plain)


@pytest.mark.parametrize("z3", [True, False], ids=["z3", "z2"])
def test_layers_compiled_after_wrapping(mesh, rank, world_size, z3):
    """With their hooks, which break the graph."""

    def wrap(model: nn.Module) -> None:
        for layer in model.layers:
            layer.compile(backend="aot_eager")

    run(mesh, rank, world_size, Setup(z3=z3, make=LoopModel, recipe="b"), plain, wrap)


@pytest.mark.parametrize("z3", [True, False], ids=["z3", "z2"])
def test_no_sync_keeps_gradients_back_and_sends_nothing(mesh, rank, world_size, z3):
    model, optimizer, reference = Setup(z3=z3, make=LoopModel).build(mesh)
    for step in range(STEPS):
        dmuon.comm_stats(model, reset=True)
        with dmuon.no_sync(model):
            with dmuon.no_sync(model):  # leaving the inner one must not turn reductions on
                loss_of(model, batch(10 * step, rank)).backward()
            loss_of(model, batch(10 * step + 1, rank)).backward()
        assert dmuon.comm_stats(model).reduce_calls == 0
        assert all(param._reduced_grad is None for param in dmuon.get_dedicated_params(model))
        loss_of(model, batch(10 * step + 2, rank)).backward()
        assert dmuon.comm_stats(model).reduce_calls == (4 if world_size > 1 else 0)
        for i in range(3):
            losses = [loss_of(reference, batch(10 * step + i, r)) for r in range(world_size)]
            reference.backward(losses, world_size)
        step_both(mesh, model, optimizer, reference)


@pytest.mark.parametrize("name", ["optimizer", "model"])
def test_fsdp2s_own_control_reaches_dedicated_matrices(mesh, rank, world_size, name):
    model, optimizer, reference = Setup(make=LoopModel).build(mesh)
    model.set_requires_gradient_sync(False)
    loss_of(model, batch(0, rank)).backward()
    model.set_requires_gradient_sync(True)
    loss_of(model, batch(1, rank)).backward()
    for i in range(2):
        reference.backward([loss_of(reference, batch(i, r)) for r in range(world_size)], world_size)
    assert_same(model, reference, tolerance=1e-5, grads=True)
    (optimizer if name == "optimizer" else model).zero_grad()
    assert all(param._reduced_grad is None for param in dmuon.get_dedicated_params(model))


@pytest.mark.parametrize("recipe", ["a", "b"])
def test_a_late_rank_disturbs_nothing(mesh, rank, world_size, recipe):
    """Its peers offer gathers early; FSDP2's own collectives keep their places all the same."""
    model, optimizer, reference = Setup(make=LoopModel, recipe=recipe).build(mesh)

    def late(step: int) -> Callable:
        def hook(gradient: torch.Tensor) -> None:
            if rank == step % world_size:
                time.sleep(0.35)  # longer than a host waits before it offers the next gather

        return hook

    for step in range(2):
        out = model(batch(step, rank), nested=True)
        out["hidden"][0][4].register_hook(late(step))
        out["logits"].pow(2).mean().backward()
        losses = [reference(batch(step, r), nested=True)["logits"].pow(2).mean() for r in range(world_size)]
        reference.backward(losses, world_size)
        step_both(mesh, model, optimizer, reference)
