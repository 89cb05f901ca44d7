"""Runs every check of `make lint` and names the ones that failed.

usage: python tools/lint.py [--fix]     (--fix formats C++ and Python instead of checking their format)
"""

import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sysconfig.get_path("scripts"))
CXX_FOLDERS = ("include", "src", "tests", "examples", "bench")
CXX_SUFFIXES = {".h", ".cuh", ".cpp", ".cu"}


def cxx_files() -> list[str]:
    paths = (path for folder in CXX_FOLDERS for path in (ROOT / folder).rglob("*"))
    return sorted(str(path.relative_to(ROOT)) for path in paths if path.suffix in CXX_SUFFIXES)


def checks(fix: bool) -> dict[str, list[str]]:
    clang_format = [str(BIN / "clang-format"), *(["-i"] if fix else ["--dry-run", "-Werror"]), *cxx_files()]
    ruff = str(BIN / "ruff")
    return {
        "clang-format": clang_format,
        "ruff format": [ruff, "format", "--quiet", *([] if fix else ["--diff"]), "."],
        "ruff check": [ruff, "check", "--quiet", *(["--fix"] if fix else []), "."],
        "arrows": [sys.executable, "tools/check_arrows.py"],
        "sizes": [sys.executable, "tools/check_sizes.py"],
        "docs": [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"],  # dead links and anchors fail
    }


def main(argv: list[str]) -> int:
    commands = checks(fix="--fix" in argv)
    failed = [name for name, command in commands.items() if subprocess.run(command, cwd=ROOT).returncode != 0]
    print(
        f"lint: {len(commands) - len(failed)} of {len(commands)} checks passed",
        *(f"FAILED: {n}" for n in failed),
        sep="\n",
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
