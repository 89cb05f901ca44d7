"""Publishing in the background changes no bit, whatever the next use of a group is.

torchrun --nproc_per_node=4 tests/distributed/test_hsdp_async_correctness.py
"""

import sys
from collections.abc import Callable

import pytest
import torch
from reference import TinyModel, batch, loss_of
from setup import Setup, check_invariants

import dmuon

pytestmark = pytest.mark.ranks(2, 4)

STEPS = 20
FEWER_STEPS = 8
"""Of the loops about the next use of a group: two rounds of the longest of them."""


class Skipping(TinyModel):
    """Runs only the layers it is told to."""

    def __init__(self) -> None:
        super().__init__(dim=16, hidden=24, layers=3)

    def forward(self, tokens, chosen=(0, 1, 2)):
        x = self.embedding(tokens)
        for index in chosen:
            x = self.layers[index](x)
        return self.head(x)


def plain(model, optimizer, step: int, rank: int) -> float:
    loss = loss_of(model, batch(step, rank))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def skipped_modules(model, optimizer, step: int, rank: int) -> float:
    """A group may wait many steps for its next use."""
    chosen = [(0, 1, 2), (0,), (2,), (0,)][step % 4]
    loss = loss_of(lambda tokens: model(tokens, chosen), batch(step, rank))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def step_twice(model, optimizer, step: int, rank: int) -> float:
    """The second step comes before anything consumed the first one's publish."""
    loss = loss_of(model, batch(step, rank))
    loss.backward()
    optimizer.step()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def evaluation(model, optimizer, step: int, rank: int) -> float:
    plain(model, optimizer, step, rank)
    with torch.no_grad():
        return loss_of(model, batch(step + 500, rank)).item()


def run(setup: Setup, mesh, rank: int, loop: Callable) -> tuple[list[float], list[torch.Tensor]]:
    model, optimizer, _ = setup.build(mesh)
    losses = [loop(model, optimizer, step, rank) for step in range(STEPS if loop is plain else FEWER_STEPS)]
    check_invariants(model)
    state = [p._owned_data for p in dmuon.get_dedicated_params(model) if p._owned_data is not None]
    for p in model.parameters():
        local = getattr(p, "_local_tensor", p)
        if not local.is_meta:
            state.append(local)
        values = (value for value in optimizer.state[p].values() if isinstance(value, torch.Tensor))
        state += [value for value in values if not value.is_meta]
    return losses, [getattr(t, "_local_tensor", t).detach().clone() for t in state]


@pytest.mark.parametrize("z3", [True, False], ids=["z3", "z2"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_async_equals_sync_bit_for_bit(mesh_2d, rank, z3, dtype):
    """Losses, masters, momentum, published copies, and everything of FSDP2's."""
    compare(mesh_2d, rank, z3, dtype, plain)


@pytest.mark.parametrize("loop", [skipped_modules, step_twice, evaluation], ids=lambda loop: loop.__name__)
def test_whatever_the_next_use_is(mesh_2d, rank, loop):
    compare(mesh_2d, rank, True, None, loop)


def compare(mesh_2d, rank: int, z3: bool, dtype: torch.dtype | None, loop: Callable) -> None:
    results = [
        run(Setup(z3=z3, dtype=dtype, make=Skipping, recipe="b", replicate_async=asynchronous), mesh_2d, rank, loop)
        for asynchronous in (True, False)
    ]
    assert results[0][0] == results[1][0]
    assert len(results[0][1]) == len(results[1][1])
    for ours, theirs in zip(results[0][1], results[1][1], strict=True):
        assert torch.equal(ours, theirs)


def test_masters_changed_outside_the_optimizer_are_an_error_until_published(mesh_2d, rank):
    model, optimizer, _ = Setup(make=Skipping, recipe="b").build(mesh_2d)
    plain(model, optimizer, 0, rank)
    owned = [param for param in dmuon.get_dedicated_params(model) if param.is_owner]
    with torch.no_grad():
        for param in owned:
            param.parameter.mul_(0.5)
    if owned:
        with pytest.raises(RuntimeError, match=f"'{owned[0].name}' was changed on its owner outside the optimizer"):
            model._dmuon.runtime.pre_forward(_group_of(model, owned[0]), [])
        model._dmuon.runtime.post_forward(_group_of(model, owned[0]), [])
    dmuon.publish(model)
    check_invariants(model)
    plain(model, optimizer, 1, rank)
    check_invariants(model)


def _group_of(model, param) -> int:
    return next(i for i, group in enumerate(model._dmuon.groups) if param in group.params)


def test_an_optimizer_may_die_before_its_publish_was_consumed(mesh_2d, rank):
    model, optimizer, _ = Setup(make=Skipping, recipe="b").build(mesh_2d)
    plain(model, optimizer, 0, rank)
    del optimizer
    check_invariants(model)
    loss_of(model, batch(1, rank)).backward()
    check_invariants(model)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
