"""C++ and Python give the same numbers: the program tests/cpp/parity/dump_training.cpp trains the model below on thread
ranks, without Python, and what it writes is compared with what these ranks hold after the same steps.
"""

import os
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from reference import relative_error
from torch.distributed.fsdp import MixedPrecisionPolicy

import dmuon

PROGRAM = Path(__file__).resolve().parents[2] / "build/release/tests/cpp/dmuon_dump_training"
LAYERS, WIDTH, HIDDEN, ROWS = 4, 24, 56, 64
STEPS = 4


def waves(shape: tuple[int, int], step: float, shift: float, scale: float) -> torch.Tensor:
    indices = torch.arange(shape[0] * shape[1], dtype=torch.float64)
    return (scale * torch.sin(step * indices * indices + shift)).float().view(shape)


class Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.up.weight = nn.Parameter(waves((HIDDEN, WIDTH), 0.7, index, WIDTH**-0.5))
        self.down.weight = nn.Parameter(waves((WIDTH, HIDDEN), 0.9, index, HIDDEN**-0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(index) for index in range(LAYERS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def train(mesh, rank: int, z3: bool, bf16: bool) -> list[dmuon.DedicatedParam]:
    model = Model()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if bf16 else None
    dmuon.dedicate_params(model, mesh, lambda n, p: True, reshard_after_forward=z3, mp_policy=policy)
    optimizer = dmuon.Muon(model, lr=0.002, weight_decay=0.01)
    for step in range(STEPS):
        x = waves((ROWS, WIDTH), 0.37 + 0.11 * rank, 1.3 * step, 1.0).to(mesh.device_type)
        model(x).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return dmuon.get_dedicated_params(model)


def train_in_cpp(folder: Path, world_size: int, z3: bool, bf16: bool) -> list[torch.Tensor]:
    """Rank 0 runs the program; everybody gets its matrices."""
    flat = torch.empty(2 * LAYERS * WIDTH * HIDDEN)
    problem = [""]
    if dist.get_rank() == 0:
        path = folder / "matrices.f32"
        command = [PROGRAM, str(world_size), "z3" if z3 else "z2", "bf16" if bf16 else "fp32", str(STEPS), path]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        problem = [done.stderr or f"exit status {done.returncode}" if done.returncode else ""]
        if not done.returncode:
            flat = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.float32)
    dist.broadcast_object_list(problem, src=0)
    assert not problem[0], problem[0]
    dist.broadcast(flat, src=0)
    shapes = [(HIDDEN, WIDTH), (WIDTH, HIDDEN)] * LAYERS
    return [part.view(shape) for part, shape in zip(flat.split(WIDTH * HIDDEN), shapes, strict=True)]


@pytest.mark.skipif(not PROGRAM.exists(), reason=f"needs {PROGRAM.name}, which `make test-cpp` builds")
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("z3", [False, True], ids=["z2", "z3"])
def test_cpp_trains_the_same_matrices(mesh, rank, world_size, z3, bf16, tmp_path):
    if mesh.device_type != "cpu":
        pytest.skip("thread ranks are CPU only")
    expected = train_in_cpp(tmp_path, world_size, z3, bf16)
    for param, value in zip(train(mesh, rank, z3, bf16), expected, strict=True):
        if param.is_owner:
            error = relative_error(param.parameter.detach(), value)
            assert error <= 1e-6, f"{param.name}: relative error {error:.2e}"
