"""What `import dmuon` says when the C++ library is missing or was built with another torch."""

import json
from pathlib import Path

import pytest
import torch

from dmuon import _library


def test_another_torch_minor_is_refused() -> None:
    with pytest.raises(ImportError, match=r"built with torch 2\.99\.0, but torch .* is imported; .*make build"):
        _library.check_build({"torch": "2.99.0"}, torch.__version__)


def test_another_patch_or_build_of_the_same_minor_is_accepted() -> None:
    _library.check_build({"torch": "2.11.1+cpu"}, "2.11.0+cu130")


@pytest.mark.parametrize("present", [[], ["libdmuon.so"], ["build_info.json"]])
def test_missing_library_says_how_to_build(tmp_path: Path, present: list[str]) -> None:
    for name in present:
        (tmp_path / name).write_text("{}")
    with pytest.raises(ImportError, match="has not been built. In a checkout run `make build`"):
        _library.read_build_info(tmp_path)


def test_library_in_use_was_built_with_this_torch() -> None:
    info = _library.load()
    assert info["torch"] == torch.__version__
    assert info == json.loads((Path(_library.__file__).parent / "lib" / "build_info.json").read_text())
