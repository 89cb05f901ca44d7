"""Checks that the includes follow the arrows between rooms (CONTRIBUTING.md, "Rooms and arrows").

usage: python tools/check_arrows.py [ROOT]
"""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

# bindings -> {optim, checkpoint, runtime} -> {newton_schulz, comm, plan} -> kernels (newton_schulz and comm only)
ARROWS = {
    "bindings": {"optim", "checkpoint", "runtime", "newton_schulz", "comm", "plan"},
    "optim": {"newton_schulz", "plan"},  # knows nothing of ranks
    "checkpoint": {"newton_schulz", "comm", "plan"},
    "runtime": {"newton_schulz", "comm", "plan"},
    "newton_schulz": {"kernels"},
    "comm": {"kernels"},
    "plan": set(),
    "kernels": set(),
}

# The room of each header in include/dmuon/.
PUBLIC_HEADERS = {
    "plan": {"plan.h", "layout.h", "memory_model.h"},
    "comm": {
        "c10d_communicator.h",
        "communicator.h",
        "peer_copy_communicator.h",
        "pending.h",
        "recording_communicator.h",
        "reproducible_communicator.h",
        "stream.h",
        "thread_communicator.h",
    },
    "newton_schulz": {"newton_schulz.h", "ns_coefficients.h"},
    "optim": {"muon.h"},
    "checkpoint": {"checkpoint.h", "safetensors.h"},
    "runtime": {"dedicated_param.h", "dedicated_param_group.h", "runtime.h"},
}
DEFAULT_PUBLIC_ROOM = "runtime"

TORCH = re.compile(r"(torch|ATen|c10|caffe2)/")
REGISTRATION = {"torch/library.h", "torch/custom_class.h", "torch/script.h"}
PYTHON_ABI = re.compile(r"Python\.h|pybind11/|torch/(extension|python)\.h|torch/csrc/utils/pybind\.h")
WITHOUT_TORCH = {"plan", "kernels"}
SOURCE_SUFFIXES = {".h", ".hpp", ".cuh", ".cpp", ".cu"}
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)


def room_of_public(header: str) -> str:
    return next((room for room, names in PUBLIC_HEADERS.items() if header in names), DEFAULT_PUBLIC_ROOM)


def room_of_file(path: Path) -> str | None:
    """The room of a file of the repository (`path` is relative to its root); None for files outside every room."""
    match path.parts:
        case ("include", "dmuon", *_, name):
            return room_of_public(name)
        case ("src", room, _, *_):
            return room
    return None


def room_of_include(target: str, folder: Path, root: Path) -> str | None:
    """The room that `#include target` reaches from a file in `folder`; None for anything that is not ours."""
    if target.startswith("dmuon/"):
        return room_of_public(target.removeprefix("dmuon/"))
    if (root / folder / target).is_file():
        return room_of_file(Path(os.path.normpath(folder / target)))
    first = target.partition("/")[0]
    return first if first in ARROWS else None


def problems_of(path: Path, target: str, root: Path) -> Iterator[str]:
    """What is wrong with `#include target` in the file `path`."""
    room = room_of_file(path)
    if room not in ARROWS:
        yield f"is in src/{room}/, which is no room: add it to ARROWS with its arrows, or move the file"
        return
    reached = room_of_include(target, path.parent, root)
    if reached not in {None, room} | ARROWS[room]:
        allowed = ", ".join(sorted(ARROWS[room])) or "no other room"
        yield f"includes {target} of room {reached}; room {room} may include {allowed}"
    if room in WITHOUT_TORCH and TORCH.match(target):
        yield f"includes {target}; room {room} must not include torch"
    if room != "bindings" and target in REGISTRATION:
        yield f"includes {target}; only src/bindings/ registers with torch (CustomClassHolder is in ATen/core/ivalue.h)"
    if PYTHON_ABI.match(target):
        yield f"includes {target}; the library has no Python ABI"


def violations(root: Path) -> list[str]:
    found = []
    for path in sorted([*root.glob("include/**/*"), *root.glob("src/*/**/*")]):
        if path.suffix not in SOURCE_SUFFIXES:
            continue
        relative = path.relative_to(root)
        for match in INCLUDE.finditer(text := path.read_text()):
            line = text.count("\n", 0, match.start(1)) + 1
            found += [f"{relative}:{line}: {problem}" for problem in problems_of(relative, match[1], root)]
    return found


def main(argv: list[str]) -> int:
    root = Path(argv[0]) if argv else Path(__file__).resolve().parent.parent
    found = violations(root)
    print("\n".join(found) if found else "arrows: every include follows them")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
