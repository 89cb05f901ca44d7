"""The checks of `make lint` find a planted violation.  A check that cannot fail counts for nothing."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def load_tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


arrows = load_tool("check_arrows")
sizes = load_tool("check_sizes")


def plant(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


@pytest.mark.parametrize(
    ("path", "include", "message"),
    [
        ("src/optim/muon.cpp", '"comm/agreement.h"', "room comm; room optim may include"),
        ("src/optim/muon.cpp", '"dmuon/communicator.h"', "room comm; room optim may include"),
        ("src/optim/muon.cpp", '"dmuon/runtime.h"', "room runtime; room optim may include"),
        ("src/plan/lpt.cpp", '"dmuon/pending.h"', "room plan may include no other room"),
        ("src/plan/lpt.cpp", '"../comm/stream.h"', "room plan may include no other room"),
        ("src/plan/lpt.cpp", "<torch/torch.h>", "room plan must not include torch"),
        ("src/plan/lpt.cpp", "<c10/util/Exception.h>", "room plan must not include torch"),
        ("src/kernels/gram.cu", "<ATen/ATen.h>", "room kernels must not include torch"),
        ("src/runtime/runtime.cpp", '"kernels/gram.h"', "room kernels; room runtime may include"),
        ("src/runtime/runtime.cpp", '"optim/muon.h"', "room optim; room runtime may include"),
        ("src/comm/stream.cpp", '"dmuon/plan.h"', "room plan; room comm may include"),
        ("src/comm/ops.cpp", "<torch/library.h>", "only src/bindings/ registers"),
        ("src/bindings/ops.cpp", "<torch/extension.h>", "no Python ABI"),
        ("include/dmuon/layout.h", "<ATen/core/Tensor.h>", "room plan must not include torch"),
        ("include/dmuon/communicator.h", '"dmuon/runtime.h"', "room runtime; room comm may include"),
        ("src/attic/old.cpp", "<vector>", "no room"),
    ],
)
def test_include_against_the_arrows_is_found(tmp_path: Path, path: str, include: str, message: str) -> None:
    plant(tmp_path, "src/comm/stream.h", "")
    plant(tmp_path, path, f"// comment\n#include {include}\n")
    (found,) = arrows.violations(tmp_path)
    assert found.startswith(f"{path}:2: ")
    assert message in found
    assert arrows.main([str(tmp_path)]) == 1


def test_includes_along_the_arrows_are_accepted(tmp_path: Path) -> None:
    plant(tmp_path, "src/bindings/ops.cpp", '#include <torch/library.h>\n#include "dmuon/runtime.h"\n')
    plant(
        tmp_path, "src/runtime/group.cpp", '#include "runtime/group.h"\n#include "group.h"\n#include "dmuon/plan.h"\n'
    )
    plant(tmp_path, "src/runtime/group.h", "#include <ATen/ATen.h>\n")
    plant(tmp_path, "src/newton_schulz/gram.cpp", '#include "kernels/gram.h"\n#include <vector>\n')
    plant(tmp_path, "src/pch.h", "#include <ATen/ATen.h>\n")
    assert arrows.main([str(tmp_path)]) == 0


def statements(count: int) -> str:
    return "".join(f"  x += {i};\n" for i in range(count))


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("include/dmuon/plan.h", "\n" * 251, "251 lines, the limit for .h is 250"),
        ("src/plan/plan.cpp", "\n" * 501, "501 lines, the limit for .cpp is 500"),
        ("src/kernels/gram.cu", "\n" * 601, "601 lines, the limit for .cu is 600"),
        ("tests/python/test_a.py", "\n" * 451, "451 lines, the limit for .py is 450"),
        ("src/plan/plan.cpp", f"int f(int x) {{\n{statements(80)}}}\n", "f has 82 lines, the limit is 80"),
        (
            "src/kernels/gram.cu",
            f"__global__ void f(int x) {{\n{statements(150)}}}\n",
            "f has 152 lines, the limit is 150",
        ),
        ("src/plan/plan.cpp", "int f(int x) {\n" + "  if (x) x++;\n" * 12 + "}\n", "f has cyclomatic complexity 13"),
        ("tools/a.py", "def f(x):\n" + "    if x:\n        x += 1\n" * 12, "f has cyclomatic complexity 13"),
        ("src/plan/plan.cpp", f"int f({', '.join(f'int p{i}' for i in range(9))}) {{}}\n", "f has 9 parameters"),
    ],
)
def test_size_over_a_limit_is_found(tmp_path: Path, path: str, text: str, message: str) -> None:
    plant(tmp_path, path, text)
    (found,) = sizes.violations(tmp_path)
    assert found.startswith(f"{path}:")
    assert message in found
    assert sizes.main([str(tmp_path)]) == 1


def test_sizes_at_the_limits_are_accepted(tmp_path: Path) -> None:
    plant(tmp_path, "src/plan/plan.cpp", f"int f(int x) {{\n{statements(78)}}}\n" + "\n" * 420)
    plant(tmp_path, "src/kernels/gram.cu", f"__global__ void f(int x) {{\n{statements(148)}}}\n")
    assert sizes.main([str(tmp_path)]) == 0


def test_too_much_python_is_found(tmp_path: Path) -> None:
    plant(tmp_path, "src/plan/plan.cpp", "int x;\n" * 70)
    plant(tmp_path, "python/dmuon/muon.py", "x = 1\n" * 30)
    (found,) = sizes.violations(tmp_path)
    assert "30.0% of the product is Python, the limit is 25%" in found


def test_the_repository_follows_its_own_rules() -> None:
    assert arrows.violations(TOOLS.parent) == []
    assert sizes.violations(TOOLS.parent) == []
