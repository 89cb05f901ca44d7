"""Checks the length of files and functions, the complexity of functions, and the share of Python in the product.

usage: python tools/check_sizes.py [ROOT]
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import lizard
from lizard_languages import CLikeReader

FOLDERS = ("include", "src", "python", "tests", "examples", "bench", "tools")
FILE_LINES = {".h": 250, ".cuh": 250, ".cpp": 500, ".cu": 600, ".py": 450}
FUNCTION_LINES = 80
KERNEL_LINES = 150  # functions in .cu and .cuh files
COMPLEXITY = 12
PARAMETERS = 8
PYTHON_SHARE = 0.25  # of the non-blank lines of include/, src/ and python/

CLikeReader.ext = [*CLikeReader.ext, "cu", "cuh"]


def sources(root: Path, folders: tuple[str, ...] = FOLDERS) -> list[Path]:
    paths = (path for folder in folders for path in (root / folder).rglob("*"))
    return sorted(path for path in paths if path.suffix in FILE_LINES and path.is_file())


def long_file(path: Path) -> Iterator[str]:
    lines, limit = len(path.read_text().splitlines()), FILE_LINES[path.suffix]
    if lines > limit:
        yield f"1: {lines} lines, the limit for {path.suffix} is {limit}"


def large_functions(path: Path) -> Iterator[str]:
    limit = KERNEL_LINES if path.suffix in {".cu", ".cuh"} else FUNCTION_LINES
    for function in lizard.analyze_file(str(path)).function_list:
        where = f"{function.start_line}: {function.name}"
        if function.length > limit:
            yield f"{where} has {function.length} lines, the limit is {limit}"
        if function.cyclomatic_complexity > COMPLEXITY:
            yield f"{where} has cyclomatic complexity {function.cyclomatic_complexity}, the limit is {COMPLEXITY}"
        # Python is left to ruff (PLR0913), which does not count keyword-only parameters of public functions twice.
        if path.suffix != ".py" and function.parameter_count > PARAMETERS:
            yield f"{where} has {function.parameter_count} parameters, the limit is {PARAMETERS}: use a struct"


def python_share(root: Path) -> float:
    """Non-blank Python lines of the product / all its non-blank lines; 0 for an empty tree."""
    count = {True: 0, False: 0}
    for path in sources(root, ("include", "src", "python")):
        count[path.suffix == ".py"] += sum(1 for line in path.read_text().splitlines() if line.strip())
    total = count[True] + count[False]
    return count[True] / total if total else 0.0


def violations(root: Path) -> list[str]:
    found = []
    for path in sources(root):
        problems = [*long_file(path), *large_functions(path)]
        found += [f"{path.relative_to(root)}:{problem}" for problem in problems]
    share = python_share(root)
    if share > PYTHON_SHARE:
        found.append(f"python/: {share:.1%} of the product is Python, the limit is {PYTHON_SHARE:.0%}")
    return found


def main(argv: list[str]) -> int:
    root = Path(argv[0]) if argv else Path(__file__).resolve().parent.parent
    found = violations(root)
    print("\n".join(found) if found else f"sizes: all within limits, {python_share(root):.1%} of the product is Python")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
