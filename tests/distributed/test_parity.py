"""Training over the mesh equals one process on the mean gradient of all ranks' distinct data."""

import pytest
import torch
from reference import MuonSettings, TinyModel, batch, loss_of
from setup import Setup, align, assert_same, check_invariants, update_tolerance

STEPS = 5


def train(setup: Setup, mesh, rank: int, world_size: int, amplifies: bool = False) -> None:
    """In bf16 the reference starts every step from the model's values: a last-bit difference of a master may flip a
    bf16 rounding, which later steps would amplify; on CUDA too, where Newton-Schulz runs in fp16.  Within a step both
    sides do the same arithmetic.  In fp32 weights may drift by rounding over all steps, and still agree to 1e-6; a
    gradient at drifted weights is held to ten times that.  A model that `amplifies` rounding, by attention, starts
    every step from the same values and is held to twice that.
    """
    aligned = amplifies or setup.dtype is not None or mesh.device_type != "cpu"
    grad_tolerance = 1e-6 if setup.dtype is not None else 1e-5
    model, optimizer, reference = setup.build(mesh)
    check_invariants(model)
    for step in range(STEPS):
        loss = loss_of(model, batch(step, rank))
        check_invariants(model)
        loss.backward()
        check_invariants(model)
        losses = [loss_of(reference, batch(step, r)) for r in range(world_size)]
        torch.testing.assert_close(loss.detach().cpu(), losses[rank].detach().cpu(), rtol=1e-5, atol=1e-6)
        reference.backward(losses, world_size)
        assert_same(model, reference, grad_tolerance, grads=True)
        optimizer.step()
        reference.step()
        check_invariants(model)
        assert_same(model, reference, update_tolerance(mesh, 2e-6 if amplifies else 1e-6))
        optimizer.zero_grad()
        reference.zero_grad()
        if aligned:
            align(model, reference)


@pytest.mark.parametrize("z3", [True, False], ids=["z3", "z2"])
@pytest.mark.parametrize("recipe", ["a", "b", "free"])
def test_fp32(mesh, rank, world_size, z3, recipe):
    train(Setup(z3=z3, recipe=recipe), mesh, rank, world_size)


@pytest.mark.parametrize("z3", [True, False], ids=["z3", "z2"])
@pytest.mark.parametrize("recipe", ["a", "b"])
def test_bf16_policy(mesh, rank, world_size, z3, recipe):
    train(Setup(z3=z3, recipe=recipe, dtype=torch.bfloat16), mesh, rank, world_size)


def test_shapes_that_need_padding(mesh, rank, world_size):
    setup = Setup(make=lambda: TinyModel(dim=13, hidden=31, layers=2))
    train(setup, mesh, rank, world_size)


def test_without_nesterov_and_decay(mesh, rank, world_size):
    setup = Setup(settings=MuonSettings(lr=0.003, momentum=0.9, weight_decay=0.0, nesterov=False))
    train(setup, mesh, rank, world_size)
