"""What `elementwise=` refuses: on every rank, with names, and nothing is changed."""

import pytest
import torch
import torch.nn as nn
from elementwise import Transformer
from reference import TinyModel, batch, is_matrix, loss_of
from test_setup_errors import fails
from torch.distributed.fsdp import MixedPrecisionPolicy

import dmuon

pytestmark = pytest.mark.ranks(1, 2)


def everything(name: str, parameter: nn.Parameter) -> bool:
    return True


def with_parameter(parameter: nn.Parameter) -> TinyModel:
    model = TinyModel()
    model.layers[0].extra = parameter
    return model


@pytest.mark.parametrize("shape", [(), (0, 3)])
def test_shapes_without_a_dimension_or_an_element(mesh, shape):
    bad = with_parameter(nn.Parameter(torch.ones(shape)))
    match = rf"'layers\.0\.extra' has shape \({', '.join(map(str, shape))}\).*shape \(1,\)"
    fails(mesh, is_matrix if shape == () else lambda n, p: "mix" in n, match, bad, elementwise=everything)


def test_not_floating(mesh):
    bad = with_parameter(nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False))
    fails(mesh, is_matrix, r"'layers\.0\.extra' has dtype torch\.int64", bad, elementwise=everything)


def test_another_dtype_than_the_matrices_of_the_layer(mesh):
    bad = with_parameter(nn.Parameter(torch.ones(3, dtype=torch.bfloat16)))
    fails(mesh, is_matrix, r"'layers\.0' have dtypes .*bfloat16 \(layers\.0\.extra\)", bad, elementwise=everything)


def test_another_dtype_than_the_matrices(mesh):
    """In a group of its own: it would be computed with in another dtype than its own."""

    def with_head(dtype: torch.dtype) -> TinyModel:
        model = TinyModel()
        model.embedding = nn.Embedding(4096, 24)
        model.head = nn.Linear(24, 4096, bias=False, dtype=dtype)
        return model

    bad = with_head(torch.bfloat16)
    match = r"'embedding\.weight' has dtype torch\.float32, 'head\.weight' torch\.bfloat16"
    fails(mesh, is_matrix, match, bad, elementwise=everything)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    dmuon.dedicate_params(bad, mesh, is_matrix, mp_policy=policy, elementwise=everything)
    assert {leaf.dtype for leaf in bad._dmuon.unsharded} == {torch.bfloat16}
    bad = with_head(torch.float64)
    fails(mesh, is_matrix, r"'head\.weight' torch\.float64", bad, elementwise=everything, mp_policy=policy)


def test_predicates_that_differ_between_ranks(mesh, rank, world_size):
    if world_size == 1:
        pytest.skip("needs two ranks to differ")
    fails(mesh, is_matrix, r"head\.weight", elementwise=lambda n, p: rank == 0 or "head" not in n)
    here = lambda n, p: is_matrix(n, p) and (rank == 0 or "layers.1.mix" not in n)  # noqa: E731
    fails(mesh, here, r"layers\.1\.mix\.weight.*elementwise=24x24", elementwise=everything)


def test_tied_parameters_of_both_kinds(mesh):
    fails(
        mesh,
        lambda n, p: n == "head.weight",
        "'head.weight', a matrix by the predicate, and 'embedding.weight'",
        Transformer(tied=True),
        elementwise=everything,
    )


def test_no_matrix(mesh):
    fails(mesh, lambda n, p: False, "no parameter satisfies the predicate", elementwise=everything)


def test_modules_that_would_not_see_gathered_weights(mesh):
    model = TinyModel()
    model.lstm = nn.LSTM(4, 4)
    fails(mesh, is_matrix, r"'lstm\.weight_ih_l0' is one of LSTM", model, elementwise=everything)
    model = TinyModel()
    model.embedding.max_norm = 1.0
    fails(mesh, is_matrix, "'embedding.weight' is of an embedding with max_norm", model, elementwise=everything)


def test_a_parameter_that_neither_selects(mesh, world_size):
    model = TinyModel()
    dmuon.dedicate_params(model, mesh, is_matrix, elementwise=lambda n, p: "head" not in n)
    if world_size == 1:
        return
    with pytest.raises(ValueError, match=r"'head\.weight' is neither dedicated .* elementwise= of dedicate_params"):
        dmuon.Muon(model)


def test_what_is_selected_twice(mesh):
    """A matrix for which both are true stays a matrix."""
    model = TinyModel()
    dmuon.dedicate_params(model, mesh, is_matrix, elementwise=everything)
    kinds = {param.name: param.elementwise for param in dmuon.get_dedicated_params(model)}
    assert kinds == {n: not is_matrix(n, p) for n, p in TinyModel().named_parameters()}
    with pytest.raises(ValueError, match="is dedicated already"):
        dmuon.dedicate_params(model, mesh, is_matrix, elementwise=everything)


def test_a_sparse_gradient(mesh, rank):
    model = TinyModel()
    model.embedding.sparse = True
    dmuon.dedicate_params(model, mesh, is_matrix, elementwise=everything)
    with pytest.raises(RuntimeError, match="'embedding.weight' has a gradient of layout Sparse"):
        loss_of(model, batch(0, rank)).backward()


def test_inputs_on_the_meta_device(mesh, rank):
    """As after `tokens.to(model.embedding.weight.device)` on a rank that does not own it: torch computes with them."""
    model = TinyModel()
    dmuon.dedicate_params(model, mesh, is_matrix, elementwise=everything)
    with pytest.raises(
        RuntimeError, match=r"an input of module 'layers\.1' is on the meta device, expected (cpu|cuda)"
    ):
        model.layers[1](torch.zeros(2, 3, 24, device="meta"))
    loss_of(model, batch(0, rank)).backward()


class Attending(nn.Module):
    """Attention outside layers, whose output projection is never called; and parameters in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.bias = nn.ParameterList([torch.zeros(8), torch.ones(8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x)[0] * self.bias[1] + self.bias[0]


def test_modules_whose_parts_are_never_called(mesh):
    model = Attending()
    dmuon.dedicate_params(model, mesh, lambda n, p: p.ndim == 2, elementwise=everything)
    assert [group.name for group in model._dmuon.groups] == ["", "attention"]
    model(torch.ones(2, 3, 8, device=mesh.device_type)).sum().backward()
    for param in dmuon.get_dedicated_params(model):
        assert not param.is_owner or param._reduced_grad is not None, param.name
