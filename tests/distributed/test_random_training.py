"""Random training: what users do between and inside steps, in random order in one run; after every step the numbers
are those of one process.  A failure tells the story so far; `Story(seed, ...)` is all it takes to run it alone.
"""

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from reference import batch, loss_of
from setup import Setup, align, assert_same, check_invariants, update_tolerance
from test_cut_off import cut_off_in
from test_loops import (
    LOOPS,
    LoopModel,
    layer_skipped,
    layers_in_another_order,
    losses_of_several_modules,
    nested_outputs,
    plain,
    unused_output,
)
from torch.distributed.device_mesh import DeviceMesh

import dmuon

pytestmark = pytest.mark.ranks(2, 3, 4)

STEPS = 6
APART = [plain, layer_skipped, layers_in_another_order, nested_outputs, unused_output, losses_of_several_modules]
ENDINGS = ["step", "step", "clipped step", "zeroed in place", "skipped"]


def make_model() -> LoopModel:
    """No bias is zero: AdamW turns a tiny gradient into rounding of the size of its rate, which shows beside zeros."""
    model = LoopModel()
    for layer in model.layers:
        torch.nn.init.normal_(layer.norm.bias, std=0.1)
    return model


class Story:
    """One run beside its reference.  All ranks draw the same deeds; each has data of its own."""

    def __init__(self, seed: int, meshes: list[DeviceMesh], folder: Path, rank: int, ranks: int) -> None:
        self.dice = random.Random(seed)
        self.mesh, self.folder, self.rank, self.ranks = self.dice.choice(meshes), folder, rank, ranks
        self.setup = Setup(
            z3=self.dice.random() < 0.5,
            recipe=self.dice.choice(["b", "c", "c"]),
            replicate_async=self.dice.random() < 0.5,
            cut_elements=self.dice.choice([1, 200, 1 << 40]),
            make=make_model,
        )
        self.model, self.optimizer, self.reference = self.setup.build(self.mesh)
        self.trained = sorted(self.reference.matrices)
        self.frozen: set[str] = set()
        self.batches = 0
        self.told = [f"recipe {self.setup.recipe}, {'Z3' if self.setup.z3 else 'Z2'}, mesh {tuple(self.mesh.shape)}"]

    def go_on(self) -> None:
        """A step of training, and what comes before it."""
        between_steps = [self.freeze, self.change_rates, self.shrink, self.reshard, self.resume, self.reload]
        self.do_one_of(between_steps + self.harmless())
        for micro_batch in range(last := self.dice.randint(1, 3)):
            self.do_one_of(self.harmless())
            self.compute(held=micro_batch < last - 1 and self.dice.random() < 0.5)
        self.finish(self.dice.choice(ENDINGS))

    def harmless(self) -> list[Callable[[], None]]:
        """What may be done while gradients wait for a step."""
        return [self.evaluate, self.save, self.cut_off]

    def do_one_of(self, deeds: list[Callable[[], None]]) -> None:
        if self.dice.random() < 0.6:
            deed = self.dice.choice(deeds)
            self.told.append(deed.__name__)
            deed()

    def new_batches(self) -> int:
        self.batches += 10
        return self.batches

    def compute(self, held: bool) -> None:
        loops, first = self.choose_loops(), self.new_batches()
        self.told.append(", ".join(loop.__name__ for loop in loops) + (" without sync" if held else ""))
        with dmuon.no_sync(self.model) if held else nullcontext():
            loops[self.rank % len(loops)](self.model, lambda i: batch(first + i, self.rank))
        with self.reference.mean_over(self.ranks):
            for r in range(self.ranks):
                loops[r % len(loops)](self.reference, lambda i, r=r: batch(first + i, r))
        check_invariants(self.model)

    def choose_loops(self) -> list[Callable]:
        """One for all ranks, or one for each, of those with one forward and one backward."""
        if self.setup.recipe == "c" and self.dice.random() < 0.3:
            return [self.dice.choice(APART) for _ in range(self.ranks)]
        return [self.dice.choice(LOOPS)]

    def finish(self, ending: str) -> None:
        self.told.append(ending)
        assert_same(self.model, self.reference, tolerance=2e-5, grads=True)
        if ending == "clipped step":
            norm = dmuon.clip_grad_norm_(self.model, 0.1)
            expected = torch.nn.utils.clip_grad_norm_(self.reference.model.parameters(), 0.1)
            torch.testing.assert_close(norm.cpu(), expected.cpu(), rtol=1e-5, atol=1e-7)
        if ending != "skipped":
            self.optimizer.step()
            self.reference.step()
        self.zero_grad(set_to_none=ending != "zeroed in place")
        assert {group.state for group in self.model._dmuon.groups} == {"sharded"}
        assert_same(self.model, self.reference, update_tolerance(self.mesh, 2e-6))
        align(self.model, self.reference)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)
        self.reference.model.zero_grad(set_to_none=set_to_none)

    def evaluate(self) -> None:
        """FSDP2's first forward cannot be in inference mode."""
        tokens = batch(self.new_batches(), self.rank)
        with torch.inference_mode() if self.setup.recipe == "c" and self.dice.random() < 0.5 else torch.no_grad():
            torch.testing.assert_close(loss_of(self.model, tokens), loss_of(self.reference, tokens))

    def save(self) -> None:
        dmuon.save_checkpoint(self.folder / str(self.new_batches()), self.model, self.optimizer)

    def cut_off(self) -> None:
        """FSDP2 does not survive it."""
        if self.setup.recipe == "b":
            return
        error = self.dice.choice([KeyboardInterrupt, SystemExit, ValueError])
        where = self.dice.choice(["embedding", "layers.0", "layers.1.down", "layers.3", "head"])
        self.told.append(f"{error.__name__} in {where}")
        with pytest.raises(error), cut_off_in(self.model.get_submodule(where), error):
            loss_of(self.model, batch(self.new_batches(), self.rank))

    def freeze(self) -> None:
        """Or unfreeze.  Without gradients: a frozen parameter that has one is stepped, as in torch."""
        self.zero_grad()
        self.frozen ^= set(self.dice.sample(self.trained, 2))
        self.apply_frozen()

    def apply_frozen(self) -> None:
        for model in (self.model, self.reference.model):
            for name, p in model.named_parameters():
                p.requires_grad_(name not in self.frozen)

    @torch.no_grad()
    def shrink(self) -> None:
        """Weights are changed by hand, where they are."""
        for model in (self.model, self.reference.model):
            for p in model.parameters():
                if not p.is_meta:
                    p.mul_(0.9)
        dmuon.publish(self.model)

    def change_rates(self) -> None:
        factor = self.dice.choice([0.5, 2.0])
        for group in (*self.optimizer.param_groups, *self.reference.adamw.param_groups):
            group["lr"] *= factor
        self.reference.settings = replace(self.reference.settings, lr=self.reference.settings.lr * factor)

    def reshard(self) -> None:
        if self.setup.recipe == "b":
            self.model.set_reshard_after_forward(self.dice.random() < 0.5)

    def resume(self) -> None:
        """In a model and an optimizer that begin afresh."""
        self.zero_grad()
        path = self.folder / str(self.new_batches())
        dmuon.save_checkpoint(path, self.model, self.optimizer)
        self.model, self.optimizer, _ = self.setup.build(self.mesh)
        self.apply_frozen()
        dmuon.load_checkpoint(path, self.model, self.optimizer)

    def reload(self) -> None:
        dmuon.set_state_dict(self.model, self.optimizer, dmuon.get_state_dict(self.model, self.optimizer))


@pytest.mark.filterwarnings("ignore:.*no matrix has a gradient:RuntimeWarning")
@pytest.mark.parametrize("seed", range(12))
def test_story(mesh, hsdp_mesh, folder, rank, world_size, seed):
    story = Story(seed, [mesh, hsdp_mesh], folder, rank, world_size)
    try:
        for _ in range(STEPS):
            story.go_on()
    except Exception as error:
        error.add_note("; ".join(story.told))
        raise
