"""Run by .ci/run with the interpreter that the wheel was installed for, from another folder.

usage: python wheel_check.py SITE_PACKAGES
"""

import sys
from pathlib import Path

import torch

import dmuon


def main(site_packages: str) -> None:
    package = Path(dmuon.__file__).parent
    assert package.parent == Path(site_packages), f"dmuon was imported from {package}"
    for name in ("py.typed", "lib/libdmuon.so", "lib/build_info.json"):
        assert (package / name).is_file(), f"{name} is not in the wheel"
    result = dmuon.newton_schulz(torch.eye(16) * 1e-3)
    assert (result - torch.eye(16)).abs().max() < 0.5, result
    print(f"wheel: dmuon imported from site-packages with torch {torch.__version__}, newton_schulz agrees")


if __name__ == "__main__":
    main(sys.argv[1])
