"""Shared by the Python and the distributed tests: GPU-only tests skip on a CPU machine, and never unnoticed."""

import os
from collections.abc import Callable

import pytest
import torch


def _require_gpus(count: int) -> None:
    present = torch.cuda.device_count()
    if present >= count:
        return
    reason = f"needs {count} GPU(s), found {present}"
    if os.environ.get("DMUON_REQUIRE_GPU") == "1":
        pytest.fail(f"{reason}, and DMUON_REQUIRE_GPU=1", pytrace=False)
    pytest.skip(reason)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """`@pytest.mark.gpu(count=2)` skips without two GPUs, or fails when DMUON_REQUIRE_GPU=1 says there must be."""
    if marker := item.get_closest_marker("gpu"):
        _require_gpus(marker.kwargs.get("count", 1))


@pytest.fixture(scope="session")
def require_gpus() -> Callable[[int], None]:
    """For fixtures that know only at run time how many GPUs they need."""
    return _require_gpus
