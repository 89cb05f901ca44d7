"""Forwards that an exception cuts off, also one that torch calls no hooks for: Ctrl-C, sys.exit, a signal's handler."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn as nn
from checkpoints import Run, assert_equal, whole
from reference import batch, loss_of
from setup import Setup, check_invariants, step_both
from test_interfaces import Encoder, SelfConditioned

import dmuon

pytestmark = pytest.mark.ranks(2)

ERRORS = [KeyboardInterrupt, SystemExit, ValueError]
"""The last one for comparison: torch calls hooks for it."""


@contextmanager
def cut_off_in(module: nn.Module, error: type[BaseException]) -> Iterator[None]:
    """The module's next forward raises, after its pre-forward hooks."""

    def hook(*_: object) -> None:
        raise error

    handle = module.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def calls(model: nn.Module) -> dict[str, tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]]:
    """By name: what raises, and in which call."""

    def whole(tokens: torch.Tensor) -> torch.Tensor:
        return loss_of(model, tokens)

    def layer(tokens: torch.Tensor) -> torch.Tensor:
        return model.layers[2](torch.ones(2, 3, 16, device=tokens.device))

    return {
        "the embedding": (model.embedding, whole),
        "a layer": (model.layers[1], whole),
        "inside a layer": (model.layers[1].down, whole),
        "the head": (model.head, whole),
        "a layer called alone": (model.layers[2].up, layer),
    }


@pytest.mark.parametrize("z3", [True, False], ids=["z3", "z2"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
@pytest.mark.parametrize("where", ["the embedding", "a layer", "inside a layer", "the head", "a layer called alone"])
def test_training_goes_on(mesh, rank, world_size, z3, error, where):
    model, optimizer, reference = Setup(z3=z3, make=Encoder, recipe="c").build(mesh)
    registered = dict(model.named_parameters())
    for step in range(3):
        module, call = calls(model)[where]
        with pytest.raises(error), cut_off_in(module, error):
            call(batch(10 + step, rank).to(mesh.device_type))
        loss_of(model, batch(step, rank).to(mesh.device_type)).backward()
        reference.backward([loss_of(reference, batch(step, r)) for r in range(world_size)], world_size)
        check_invariants(model)
        assert {group.state for group in model._dmuon.groups} == {"sharded"}
        assert all(p is registered[name] for name, p in model.named_parameters())
        step_both(mesh, model, optimizer, reference)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_calls_inside_a_call(mesh, rank, world_size, error):
    """The inner call is cut off, and the outer one with it; calls that run are left alone."""
    model, optimizer, reference = Setup(make=SelfConditioned, recipe="c").build(mesh)
    for step in range(2):
        with pytest.raises(error), cut_off_in(model.layers[2], error):  # first reached by the inner call
            loss_of(model, batch(10 + step, rank).to(mesh.device_type))
        loss_of(model, batch(step, rank).to(mesh.device_type)).backward()
        reference.backward([loss_of(reference, batch(step, r)) for r in range(world_size)], world_size)
        step_both(mesh, model, optimizer, reference)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_a_registered_method(mesh, rank, world_size, error):
    model, optimizer, reference = Setup(make=Encoder, recipe="c").build(mesh)
    dmuon.register_forward_method(model, "encode")
    for step in range(2):
        with pytest.raises(error), cut_off_in(model.layers[1].mix, error):
            model.encode(batch(10 + step, rank).to(mesh.device_type))
        model.encode(batch(step, rank).to(mesh.device_type)).pow(2).mean().backward()
        losses = [reference.model.encode(batch(step, r).to(mesh.device_type)).pow(2).mean() for r in range(world_size)]
        reference.backward(losses, world_size)
        step_both(mesh, model, optimizer, reference)


WAYS = ["save_checkpoint", "load_checkpoint", "get_state_dict", "set_state_dict", "state_dict"]


@pytest.mark.parametrize("z3", [True, False], ids=["z3", "z2"])
@pytest.mark.parametrize("way", WAYS)
def test_saving_and_loading_in_the_except_block(mesh, rank, folder, z3, way):
    run = Run(mesh, setup=Setup(z3=z3, make=Encoder, recipe="c")).train(range(2))
    saved, snapshot = run.values(), dmuon.get_state_dict(run.model, run.optimizer)
    dmuon.save_checkpoint(folder / "before", run.model, run.optimizer)
    if way in ("load_checkpoint", "set_state_dict"):
        run.train(range(2, 3))  # away from what is loaded
    try:
        with cut_off_in(run.model.layers[1].up, KeyboardInterrupt):
            run.model(batch(0, rank).to(mesh.device_type))
    except KeyboardInterrupt:
        if way == "save_checkpoint":
            dmuon.save_checkpoint(folder / "after", run.model, run.optimizer)
            run.train(range(2, 3))
            dmuon.load_checkpoint(folder / "after", run.model, run.optimizer)
        elif way == "load_checkpoint":
            dmuon.load_checkpoint(folder / "before", run.model, run.optimizer)
        elif way == "get_state_dict":
            assert_equal(whole(dmuon.get_state_dict(run.model, run.optimizer)), whole(snapshot))
        elif way == "set_state_dict":
            dmuon.set_state_dict(run.model, run.optimizer, snapshot)
        else:
            found = whole({"model": run.model.state_dict()})
            assert_equal(found, {key: value for key, value in saved.items() if key.startswith("model/")})
    else:
        pytest.fail("the forward was not cut off")
    assert_equal(run.values(), saved)
