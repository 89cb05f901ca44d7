"""Host time that a group costs in a step when communication costs nothing.

    python bench/host_cost.py                   (CPU, less than a minute)
    python bench/host_cost.py --device cuda     (time to enqueue; one GPU)

One process plays rank 0 of `--ranks` with torch's fake backend, whose collectives return at once.  The model's
arithmetic is negligible.  A plain model, FSDP2 with `fully_shard` on every layer, and dmuon with one group a layer run
in turn in one process, a few steps each a round.  Printed, as the median over the rounds: (T - T_plain) / layers of
forward + backward, where T is a round's quickest step, and dmuon over FSDP2; once of the process's CPU time, which
other programs disturb less, and once of the wall time, which shows waiting.
"""

import argparse
import json
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import dmuon


class Layer(nn.Module):
    """The matrices are all its parameters, so that both sides manage the same ones."""

    def __init__(self, dim: int, matrices: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)
        self.linears = nn.ModuleList([nn.Linear(dim, dim, bias=False) for _ in range(matrices)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        for linear in self.linears:
            y = linear(y)
        return x + y


class Model(nn.Module):
    def __init__(self, layers: int, dim: int, matrices: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(dim, matrices) for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Contender:
    def __init__(self, name: str, model: nn.Module, x: torch.Tensor) -> None:
        self.name = name
        self.model = model
        self.x = x
        self.cpu: list[float] = []
        self.wall: list[float] = []

    def step(self) -> None:
        """Nothing but forward and backward is timed."""
        wall, cpu = time.perf_counter(), time.process_time()
        self.model(self.x).sum().backward()
        self.cpu.append(time.process_time() - cpu)
        self.wall.append(time.perf_counter() - wall)
        if self.x.is_cuda:
            torch.cuda.synchronize()
        self.model.zero_grad()
        self.x.grad = None


def wrap(name: str, model: nn.Module, mesh: DeviceMesh) -> None:
    """`name`: plain, or fsdp2 or dmuon with z2 or z3."""
    z3 = name.endswith("z3")
    if name.startswith("dmuon"):
        # The fake backend has no peers to look for.
        dmuon.dedicate_params(model, mesh, lambda name, p: p.ndim == 2, reshard_after_forward=z3, comm="nccl")
    if name.startswith("fsdp2"):
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=z3)
        fully_shard(model, mesh=mesh, reshard_after_forward=z3)


def build(name: str, mesh: DeviceMesh, args: argparse.Namespace) -> Contender:
    torch.manual_seed(0)
    model = Model(args.layers, args.dim, args.matrices).to(args.device)
    wrap(name, model, mesh)
    return Contender(name, model, torch.randn(2, args.dim, device=args.device, requires_grad=True))


def measure(contenders: list[Contender], rounds: int, steps: int) -> None:
    """Only the quickest of a round's steps is kept: what is above it is the machine's.  The first round is warm-up."""
    for _ in range(rounds + 1):
        for contender in contenders:
            for _ in range(steps):
                contender.step()
            for samples in (contender.cpu, contender.wall):
                samples[-steps:] = [min(samples[-steps:])]
    for contender in contenders:
        del contender.cpu[0], contender.wall[0]


def report(seconds: dict[str, list[float]], layers: int) -> dict[str, float]:
    """Microseconds a unit and step, and ratios."""
    plain = seconds.pop("plain")
    result = {"plain": 1e6 * statistics.median(plain) / layers}
    for name, samples in seconds.items():
        result[name] = 1e6 * statistics.median(s - p for s, p in zip(samples, plain, strict=True)) / layers
    for mode in ("z2", "z3"):
        result[f"dmuon_over_fsdp2_{mode}"] = result[f"dmuon_{mode}"] / result[f"fsdp2_{mode}"]
    return {name: round(value, 3) for name, value in result.items()}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--matrices", type=int, default=7, help="per layer")
    parser.add_argument("--dim", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=6, help="per contender and round")
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.ranks)
    mesh = init_device_mesh(args.device, (args.ranks,), mesh_dim_names=("shard",))
    names = ["plain", "fsdp2_z2", "dmuon_z2", "fsdp2_z3", "dmuon_z3"]
    contenders = [build(name, mesh, args) for name in names]
    measure(contenders, args.rounds, args.steps)
    setup = {"torch": torch.__version__, "dmuon": dmuon.__version__} | vars(args)
    result = {
        "setup": setup,
        "cpu_microseconds_per_unit_and_step": report({c.name: c.cpu for c in contenders}, args.layers),
        "wall_microseconds_per_unit_and_step": report({c.name: c.wall for c in contenders}, args.layers),
    }
    print(json.dumps(result, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
