"""What goes in and out of hook modules, and which methods start a forward: anything Python allows."""

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn as nn
from reference import TinyModel, batch, loss_of
from setup import Setup
from test_loops import run

import dmuon

pytestmark = pytest.mark.ranks(2)


class Pair(NamedTuple):
    hidden: torch.Tensor
    extra: Any


@dataclasses.dataclass
class Record:
    hidden: torch.Tensor
    extra: Any = None
    missing: Any = None


class Output(collections.OrderedDict):
    """Like transformers' ModelOutput: a mapping with attributes."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


WRAPPERS = {
    "tuple": (lambda x, e: (x, e), lambda out: out[0]),
    "dict": (lambda x, e: {"hidden": x, "extra": e}, lambda out: out["hidden"]),
    "namedtuple": (Pair, lambda out: out.hidden),
    "dataclass": (Record, lambda out: out.hidden),
    "mapping": (lambda x, e: Output(hidden=x, extra=e), lambda out: out.hidden),
    "nested": (lambda x, e: [e, {"deep": (None, [x])}], lambda out: out[1]["deep"][1][0]),
}


class Wrapping(TinyModel):
    """Every layer and the root return their tensors in a container, beside one nobody uses and one without grad."""

    def __init__(self, kind: str, wraps_root: bool) -> None:
        super().__init__(dim=16, hidden=24, layers=3)
        self.pack, self.unpack = WRAPPERS[kind]
        self.wraps_root = wraps_root
        for layer in self.layers:
            layer.register_forward_hook(
                lambda module, args, out: self.pack(out, [3.0 * out, out.detach(), torch.arange(3), "text", None])
            )

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = self.unpack(layer(x))
        x = self.head(x)
        return self.pack(x, x.detach()) if self.wraps_root else x


KNOWN_TO_PYTREE = {"tuple", "dict", "namedtuple", "nested"}


@pytest.mark.parametrize("z3", [True, False], ids=["z3", "z2"])
@pytest.mark.parametrize("kind", WRAPPERS)
def test_outputs(mesh, rank, world_size, kind, z3):
    wraps_root = kind in KNOWN_TO_PYTREE
    unpack = WRAPPERS[kind][1] if wraps_root else lambda out: out

    def loop(call, data) -> None:
        loss_of(lambda tokens: unpack(call(tokens)), data(0)).backward()

    run(mesh, rank, world_size, Setup(z3=z3, make=lambda: Wrapping(kind, wraps_root), recipe="b"), loop)


@pytest.mark.parametrize("kind", WRAPPERS)
def test_outputs_of_the_root_without_fsdp2(mesh, rank, world_size, kind):
    torch.manual_seed(0)
    model = Wrapping(kind, wraps_root=True)
    reference = Wrapping(kind, wraps_root=True)
    reference.load_state_dict(model.state_dict())
    model.to(mesh.device_type), reference.to(mesh.device_type)
    dmuon.dedicate_params(model, mesh, lambda n, p: p.ndim == 2 and "layers" in n)
    compare_gradients(mesh, model, reference, rank, world_size, lambda m, x: m.unpack(m(x)).pow(2).mean())


@pytest.mark.parametrize("kind", sorted(set(WRAPPERS) - KNOWN_TO_PYTREE))
def test_outputs_that_fsdp2_would_overlook_are_refused(mesh, rank, kind):
    model, _, _ = Setup(make=lambda: Wrapping(kind, wraps_root=True), recipe="b").build(mesh)
    with pytest.raises(RuntimeError, match="Wrapping returns tensors inside a class that torch's pytree does not know"):
        model(batch(0, rank))


def compare_gradients(mesh, model, reference, rank: int, world_size: int, loss) -> None:
    """Three backwards of a model that is dedicated and not fully sharded, against all ranks' data in one process."""
    for step in range(3):
        tokens = [batch(step, r).to(mesh.device_type) for r in range(world_size)]
        loss(model, tokens[rank]).backward()
        for each in tokens:
            (loss(reference, each) / world_size).backward()
        expected = dict(reference.named_parameters())
        for param in dmuon.get_dedicated_params(model):
            if param.is_owner:
                torch.testing.assert_close(param._reduced_grad, expected[param.name].grad, rtol=1e-4, atol=1e-6)
        model.zero_grad(), reference.zero_grad()
        assert {group.state for group in model._dmuon.groups} == {"sharded"}


class Mixing(nn.Module):
    """A layer with keyword-only, optional, nested and non-tensor inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 16, bias=False)
        self.b = nn.Linear(16, 16, bias=False)

    def forward(self, inputs: dict, scale: float, *, residual: torch.Tensor, mask=None, mode: str = "tanh"):
        x, positions = inputs["x"]
        y = torch.tanh(self.a(x)) if mode == "tanh" else self.a(x)
        y = y + 0.01 * positions[:, None].to(y.dtype)
        return residual + scale * self.b(y if mask is None else y * mask)


class Inputs(TinyModel):
    def __init__(self) -> None:
        super().__init__(dim=16, hidden=24, layers=1)
        self.layers = nn.ModuleList([Mixing() for _ in range(3)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        positions = torch.arange(x.shape[1], device=x.device)
        mask = torch.ones(x.shape[-1], device=x.device).bool()
        for index, layer in enumerate(self.layers):
            packed = {"x": (x.detach() if index == 0 else x, positions), "unused": [None, 7]}
            x = layer(packed, 0.5, residual=x, mask=mask if index == 1 else None, mode="tanh" if index else "none")
        return self.head(x)


@pytest.mark.parametrize("z3", [True, False], ids=["z3", "z2"])
def test_inputs(mesh, rank, world_size, z3):
    def loop(call, data) -> None:
        loss_of(call, data(0)).backward()

    run(mesh, rank, world_size, Setup(z3=z3, make=Inputs, recipe="b"), loop)


class Encoder(TinyModel):
    """Has a method that is not forward, and one that calls forward."""

    def __init__(self) -> None:
        super().__init__(dim=16, hidden=24, layers=3)

    def encode(self, tokens: torch.Tensor, *, layers: int = 3) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers[:layers]:
            x = layer(x)
        return x

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encode(tokens))

    def generate(self, tokens: torch.Tensor, count: int) -> torch.Tensor:
        for _ in range(count):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], dim=1)
        return tokens


@pytest.mark.parametrize("z3", [True, False], ids=["z3", "z2"])
@pytest.mark.parametrize("registered", [True, False], ids=["registered", "not registered"])
def test_methods_that_call_submodules(mesh, rank, world_size, registered, z3):
    """Without FSDP2 (whose own register_fsdp_forward_method is for its own parameters); the rest is replicated."""
    torch.manual_seed(0)
    model, reference = Encoder(), Encoder()
    reference.load_state_dict(model.state_dict())
    model.to(mesh.device_type), reference.to(mesh.device_type)
    dmuon.dedicate_params(model, mesh, lambda n, p: p.ndim == 2 and "layers" in n, reshard_after_forward=z3)
    if registered:
        dmuon.register_forward_method(model, "encode")

    def loss(m: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        return m.encode(tokens, layers=2).pow(2).mean() + m(tokens).pow(2).mean()

    compare_gradients(mesh, model, reference, rank, world_size, loss)
    tokens = batch(0, rank).to(mesh.device_type)
    with torch.no_grad():
        assert torch.equal(model.generate(tokens, 4), reference.generate(tokens, 4))


def test_a_registered_method_ends_its_pass_when_it_raises(mesh, rank):
    torch.manual_seed(0)
    model = Encoder().to(mesh.device_type)
    dmuon.dedicate_params(model, mesh, lambda n, p: p.ndim == 2 and "layers" in n)
    dmuon.register_forward_method(model, "encode")
    with pytest.raises(TypeError):
        model.encode(batch(0, rank).to(mesh.device_type), layers="two")
    model(batch(0, rank).to(mesh.device_type)).sum().backward()
    assert {group.state for group in model._dmuon.groups} == {"sharded"}


def test_what_cannot_be_registered(mesh):
    model = Encoder()
    with pytest.raises(ValueError, match="neither the model given to dedicate_params nor a hook module"):
        dmuon.register_forward_method(model, "encode")
    dmuon.dedicate_params(model, mesh, lambda n, p: p.ndim == 2 and "layers" in n)
    with pytest.raises(ValueError, match="has no method 'decode'"):
        dmuon.register_forward_method(model, "decode")


class SelfConditioned(TinyModel):
    """Calls itself inside its forward, without grad, as diffusion models do."""

    def __init__(self) -> None:
        super().__init__(dim=16, hidden=24, layers=3)

    def forward(self, tokens: torch.Tensor, inner: bool = False) -> torch.Tensor:
        x = self.embedding(tokens)
        x = self.layers[0](x)
        if not inner:
            with torch.no_grad():
                guess = self(tokens, inner=True)
            x = x + 0.1 * guess.mean(-1, keepdim=True)
        for layer in self.layers[1:]:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize("z3", [True, False], ids=["z3", "z2"])
def test_a_model_that_calls_itself(mesh, rank, world_size, z3):
    torch.manual_seed(0)
    model, reference = SelfConditioned(), SelfConditioned()
    reference.load_state_dict(model.state_dict())
    model.to(mesh.device_type), reference.to(mesh.device_type)
    dmuon.dedicate_params(model, mesh, lambda n, p: p.ndim == 2 and "layers" in n, reshard_after_forward=z3)
    compare_gradients(mesh, model, reference, rank, world_size, lambda m, tokens: m(tokens).pow(2).mean())
