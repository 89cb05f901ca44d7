"""What users wrap around modules: checkpoint wrappers, torch.compile, autocast."""

import copy

import pytest
import torch
import torch.nn as nn
from reference import Block, TinyModel, loss_of
from setup import Setup
from test_loops import LoopModel, run
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

import dmuon

pytestmark = pytest.mark.ranks(2)


def plain(call, data) -> None:
    loss_of(call, data(0)).backward()


class Wrapped(TinyModel):
    """Checkpoint wrappers around layers, or around a part inside each layer."""

    def __init__(self, inside: bool, impl: CheckpointImpl) -> None:
        super().__init__(dim=16, hidden=24, layers=3)
        for index, layer in enumerate(self.layers):
            if inside:
                layer.mix = checkpoint_wrapper(layer.mix, impl)
                layer.up = checkpoint_wrapper(layer.up, impl)
            else:
                self.layers[index] = checkpoint_wrapper(layer, impl)


@pytest.mark.parametrize("z3", [True, False], ids=["z3", "z2"])
@pytest.mark.parametrize("impl", [CheckpointImpl.NO_REENTRANT, CheckpointImpl.REENTRANT], ids=lambda i: i.name.lower())
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "around"])
@pytest.mark.parametrize("recipe", ["a", "b"])
def test_checkpoint_wrapper(mesh, rank, world_size, inside, impl, recipe, z3):
    run(mesh, rank, world_size, Setup(z3=z3, make=lambda: Wrapped(inside, impl), recipe=recipe), plain)


@pytest.mark.parametrize("z3", [True, False], ids=["z3", "z2"])
def test_checkpoint_wrapper_around_a_dedicated_layer(mesh, rank, world_size, z3):
    """Applied last, as some trainers do."""

    def wrap(model: nn.Module) -> None:
        for index, layer in enumerate(model.layers):
            model.layers[index] = checkpoint_wrapper(layer)
        strip = model.named_parameters
        model.named_parameters = lambda *args, **kwargs: (
            (name.replace("_checkpoint_wrapped_module.", ""), p) for name, p in strip(*args, **kwargs)
        )

    run(mesh, rank, world_size, Setup(z3=z3, make=LoopModel, recipe="b"), plain, wrap)


class Compiled(TinyModel):
    """Compiled in place as a whole: hooks break the graph, blocks are compiled between them."""

    def __init__(self) -> None:
        super().__init__(dim=16, hidden=24, layers=3)

    def __deepcopy__(self, memo):
        other = TinyModel(dim=16, hidden=24, layers=3)
        other.load_state_dict(self.state_dict())
        return other


@pytest.mark.parametrize("z3", [True, False], ids=["z3", "z2"])
def test_a_compiled_model_does_not_recompile(mesh, rank, world_size, z3):
    torch._dynamo.reset()
    graphs: list[int] = []

    def loop(call, data) -> None:
        loss_of(call, data(0)).backward()
        if not isinstance(call, nn.Module):
            return
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    run(mesh, rank, world_size, Setup(z3=z3, make=Compiled, recipe="b"), loop, lambda m: m.compile(backend="aot_eager"))
    assert graphs[0] > 0, "nothing was compiled"
    assert graphs[0] == graphs[-1], f"graphs after each step: {graphs}"


@pytest.mark.parametrize("z3", [True, False], ids=["z3", "z2"])
def test_autocast(mesh, rank, world_size, z3):
    """Weights travel in fp32 and are cast by autocast, once a forward."""
    device = mesh.device_type

    def loop(call, data) -> None:
        for i in range(2):
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = loss_of(call, data(i))
            loss.backward()

    model, optimizer, reference = Setup(z3=z3, make=LoopModel, recipe="b").build(mesh)
    for step in range(3):
        before = copy.deepcopy(reference.model)
        loop(model, lambda i, step=step: torch_batch(step, i, rank))
        for r in range(world_size):
            loop(reference, lambda i, r=r, step=step: torch_batch(step, i, r))
        expected = dict(reference.model.named_parameters())
        for param in dmuon.get_dedicated_params(model):
            if param.is_owner:  # sums over ranks are rounded apart: bf16 products, fp32 sums
                wanted = expected[param.name].grad / world_size
                error = (param._reduced_grad - wanted).norm() / wanted.norm()
                assert error <= 1e-2, f"{param.name}: {error}"
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        reference.zero_grad()
        assert any(
            not torch.equal(a, b) for a, b in zip(before.parameters(), reference.model.parameters(), strict=True)
        )


def torch_batch(step: int, i: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * i + rank)
    return torch.randint(0, 61, (4, 9), generator=generator)


def test_compiled_blocks_before_dedication_keep_their_names(mesh):
    """torch.compile(module) prefixes names with _orig_mod; layers.N is still found."""

    class Prefixed(TinyModel):
        def __init__(self) -> None:
            super().__init__(dim=16, hidden=24, layers=2)
            for index in range(2):
                self.layers[index] = torch.compile(Block(16, 24), backend="aot_eager")

    model = Prefixed()
    dmuon.dedicate_params(model, mesh, lambda n, p: p.ndim == 2 and "layers" in n)
    assert [group.name for group in model._dmuon.groups] == ["layers.0", "layers.1"]
