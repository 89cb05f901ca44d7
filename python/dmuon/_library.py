"""Loads libdmuon.so into torch, after checking that it was built with the torch that is imported.

The C++ ABI of torch changes between minors; a library built with another one would crash or fail with an unreadable
list of symbols.  `build_info.json`, written beside the library by CMake, is therefore read first.
"""

import json
from functools import cache
from pathlib import Path

import torch

_LIB_DIR = Path(__file__).parent / "lib"
_HOW_TO_BUILD = (
    "In a checkout run `make build`; elsewhere run "
    "`pip install --no-build-isolation --no-cache-dir --force-reinstall --no-deps .` in dmuon's source folder."
)


def _minor(version: str) -> str:
    """ "2.11.0+cu130" -> "2.11"."""
    return ".".join(version.split(".")[:2])


def check_build(info: dict, torch_version: str) -> None:
    """Raises ImportError if the library that `info` describes cannot run on `torch_version`."""
    if _minor(info["torch"]) != _minor(torch_version):
        raise ImportError(
            f"[dmuon] libdmuon.so was built with torch {info['torch']}, but torch {torch_version} is imported; "
            f"the two must have the same minor version. {_HOW_TO_BUILD}"
        )


def read_build_info(lib_dir: Path = _LIB_DIR) -> dict:
    """{"torch": version it was built with, "dmuon": its own version, "kernels": whether CUDA kernels are in}."""
    for name in ("libdmuon.so", "build_info.json"):
        if not (lib_dir / name).is_file():
            raise ImportError(
                f"[dmuon] {lib_dir / name} is missing: the C++ library has not been built. {_HOW_TO_BUILD}"
            )
    return json.loads((lib_dir / "build_info.json").read_text())


@cache
def load() -> dict:
    """Loads the library once and returns its build info."""
    info = read_build_info()
    check_build(info, torch.__version__)
    torch.ops.load_library(str(_LIB_DIR / "libdmuon.so"))
    return info
