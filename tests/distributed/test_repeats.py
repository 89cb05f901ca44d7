"""Z3 and layers that run more than once in a forward, over real process groups: ranks must repeat one first at the same
place, or all of them get an error that names it.
"""

import pytest
import torch
import torch.nn as nn

import dmuon

pytestmark = pytest.mark.ranks(2, 3)

WIDTH, LAYERS = 8, 4


class Routed(nn.Module):
    """Layers of one shape, in any order: a gather that took another's place would go unnoticed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
        for index, layer in enumerate(self.layers):
            nn.init.constant_(layer.weight, 0.1 * (index + 1))

    def forward(self, x: torch.Tensor, route: list[int]) -> torch.Tensor:
        for index in route:
            x = self.layers[index](x) + index  # so that swapped weights give another result
        return x


def dedicated(mesh) -> tuple[nn.Module, torch.Tensor]:
    model = Routed()
    dmuon.dedicate_params(model, mesh, lambda n, p: True)
    return model, torch.ones(2, WIDTH, device=mesh.device_type)


def expected(route: list[int]) -> float:
    """A constant weight w maps a vector of equal entries v to one of entries WIDTH * w * v; then the index is added."""
    value = 1.0
    for index in route:
        value = value * WIDTH * 0.1 * (index + 1) + index
    return value


def assert_runs(model: nn.Module, x: torch.Tensor, route: list[int]) -> None:
    with torch.no_grad():
        y = model(x, route)
    torch.testing.assert_close(y, torch.full_like(y, expected(route)))


def test_at_different_places_is_an_error_on_every_rank(mesh, rank, world_size):
    if world_size == 1:
        pytest.skip("needs two ranks")
    model, x = dedicated(mesh)
    with pytest.raises(RuntimeError, match=r"module 'layers\.1' runs again .* not on every rank at the same place"):
        model(x, [0, 1, 1, 2, 3] if rank == 0 else [0, 1, 2, 1, 3])
    assert_runs(model, x, [3, 2, 1, 0])


def test_may_differ_after_an_even_one(mesh, rank):
    model, x = dedicated(mesh)
    assert_runs(model, x, [0, 1, 1, 2, 3])
    assert_runs(model, x, [0, 1, 1, 2, 3] if rank == 0 else [0, 1, 2, 1, 3, 1])
    assert_runs(model, x, [0, 2, 3] if rank == 0 else [1, 3, 1])
