"""Step time of dmuon's Muon against FSDP2 + AdamW on the same model: both in one process, interleaved, median, ratio.

    torchrun --standalone --nproc-per-node 2 bench/step_time.py --out results
    torchrun --standalone --nproc-per-node 2 bench/step_time.py --preset 250m --tokens 2048x4 2048x1 512x64
    torchrun --standalone --nproc-per-node 2 bench/step_time.py --rounds 0 --profile muon_z3 adamw_z3
    torchrun --standalone --nproc-per-node 2 bench/step_time.py --device cpu --preset tiny --tokens 16x2

A contender is named OPTIMIZER_MODE[_OPTION...]: adamw or muon; z2 or z3; `root` for fully_shard on the root only
instead of on every layer and the root (recipe b instead of a); `elementwise` for no fully_shard, with all parameters
dedicated (recipe c, muon only); `reproducible`; `nccl` or `peer` for who moves dmuon's bytes (else: whatever works best
here).  `alone` is the model in bf16 on every rank without communication, its step SGD's with lr 0: what forward and
backward take at least, on the host too.  Every contender is built once, warmed up, and then timed in turn, a few steps
at a time, so that a drifting machine hurts all alike.  Phases are timed on the GPU by events and on the host by its
clock; communication that a phase leaves running counts for the phase that waits for it.  --profile adds where the time
of one step goes.  On the CPU (gloo) phases are wall time; such a run only shows that the program works.
"""

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import plots
import step_profile
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from llama import Llama, LlamaConfig
from step_profile import PHASES, HostSpans
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import record_function

import dmuon

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
PRESETS = {
    "tiny": LlamaConfig(dim=64, hidden=128, layers=2, heads=2, vocab=256),
    "250m": LlamaConfig(dim=1024, hidden=2816, layers=14, heads=16),
    "1b": LlamaConfig(dim=2048, hidden=5632, layers=16, heads=16),
    "3b": LlamaConfig(dim=3072, hidden=8192, layers=24, heads=24),
}
CONTENDERS = [
    "adamw_z3", "muon_z3", "muon_z3_root", "muon_z3_elementwise",
    "adamw_z2", "muon_z2", "muon_z2_root", "muon_z2_elementwise",
]  # fmt: skip
RECIPES: dict[str, Callable[[Llama], list[nn.Module]]] = {
    "layers": lambda model: [*model.layers, model],
    "root": lambda model: [model],
    "elementwise": lambda model: [],
}
"""By the option that names it: the modules that get fully_shard, in this order."""
OPTIONS: dict[str, dict[str, Any]] = {
    "reproducible": {"reproducible": True},
    "nccl": {"comm": "nccl"},
    "peer": {"comm": "peer"},
}
"""By name: what dedicate_params gets."""
ALONE = "alone"
WARM_UP = 3
"""Steps of a contender for each shape before anything is measured."""
Batch = Callable[[], torch.Tensor]


class Mark:
    """A moment between phases, on the host and, with a GPU, in the current stream."""

    def __init__(self, device: str) -> None:
        self.event = torch.cuda.Event(enable_timing=True) if device == "cuda" else None
        if self.event is not None:
            self.event.record()
        self.host = time.perf_counter()
        self.wall = time.time_ns()

    def host_ms(self, later: "Mark") -> float:
        return 1e3 * (later.host - self.host)

    def ms(self, later: "Mark") -> float:
        """On the device, which has to be done with both; on the host without a GPU."""
        return self.host_ms(later) if self.event is None else self.event.elapsed_time(later.event)


@dataclass
class Contender:
    """Samples are milliseconds, one a step: `step` and PHASES on the device, host_PHASE to enqueue a phase."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    device: str
    assignment: dmuon.Assignment | None = None
    resident: int = 0
    outside: int = 0
    peak: int = 0
    marks: list[list[Mark]] = field(default_factory=list)
    samples: dict[str, list[float]] = field(default_factory=dict)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(tokens).flatten(0, 1).float(), tokens.flatten())

    def step(self, tokens: torch.Tensor) -> HostSpans:
        """Does not wait for the device.  Returns when the host was in which phase."""
        marks = [Mark(self.device)]
        with record_function("forward"):
            loss = self.loss(tokens)
        marks.append(Mark(self.device))
        with record_function("backward"):
            loss.backward()
        marks.append(Mark(self.device))
        with record_function("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad()
        marks.append(Mark(self.device))
        self.marks.append(marks)
        return {name: (marks[i].wall, marks[i + 1].wall) for i, name in enumerate(PHASES)}

    def collect(self) -> None:
        """Waits for the device and turns marks into samples."""
        step_profile.synchronise(self.device)
        for marks in self.marks:
            self._add("step", marks[0].ms(marks[-1]))
            for i, name in enumerate(PHASES):
                self._add(name, marks[i].ms(marks[i + 1]))
                self._add(f"host_{name}", marks[i].host_ms(marks[i + 1]))
        self.marks.clear()

    def _add(self, name: str, value: float) -> None:
        self.samples.setdefault(name, []).append(value)

    def discard(self) -> None:
        self.marks, self.samples = [], {}


def memory(device: str) -> tuple[int, int]:
    """Bytes in use on the GPU: of torch's allocator, and outside it (NCCL, symmetric memory, other processes).  Empties
    the allocator's cache, which also settles what another stream was still using.
    """
    if device != "cuda":
        return 0, 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return torch.cuda.memory_allocated(), total - free - torch.cuda.memory_reserved()


def is_matrix(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim == 2 and "layers" in name


@cache
def axes_of(mesh: DeviceMesh) -> dict[str, DeviceMesh]:
    """By name; the same objects for every contender, because dmuon's process groups belong to them."""
    return {"shard": mesh} if mesh.ndim == 1 else {name: mesh[name] for name in ("replicate", "shard")}


def construct_alone(device: str, config: LlamaConfig) -> Contender:
    with torch.device(device):
        model = Llama(config).to(POLICY.param_dtype)
    return Contender(ALONE, model, torch.optim.SGD(model.parameters(), lr=0.0), device)


def construct(name: str, mesh: DeviceMesh, config: LlamaConfig) -> Contender:
    """`mesh`: 1-D, or replicate x shard."""
    if name == ALONE:
        return construct_alone(mesh.device_type, config)
    kind, mode, *options = name.split("_")
    recipe = next((option for option in options if option in RECIPES), "layers")
    keywords = {key: value for option in options if option in OPTIONS for key, value in OPTIONS[option].items()}
    z3 = mode == "z3"
    axes, assignment = axes_of(mesh), None
    torch.manual_seed(0)
    with torch.device(mesh.device_type):
        model = Llama(config)
    if kind == "muon":
        assignment = dmuon.dedicate_params(
            model,
            axes["shard"],
            is_matrix,
            replicate_mesh=axes.get("replicate"),
            reshard_after_forward=z3,
            mp_policy=POLICY,
            elementwise=(lambda n, p: True) if recipe == "elementwise" else None,
            **keywords,
        )
    for module in RECIPES[recipe](model):
        fully_shard(module, mesh=mesh, mp_policy=POLICY, reshard_after_forward=z3)
    if kind == "muon":
        optimizer: torch.optim.Optimizer = dmuon.Muon(model, lr=0.02, weight_decay=0.01)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return Contender(name, model, optimizer, mesh.device_type, assignment)


def build(name: str, mesh: DeviceMesh, config: LlamaConfig, batch: Batch) -> Contender:
    """Resident is what building and the first steps leave in use; what the process needs once counts for the first."""
    before = memory(mesh.device_type)
    contender = construct(name, mesh, config)
    for _ in range(WARM_UP):
        contender.step(batch())
    contender.discard()
    gc.collect()
    after = memory(mesh.device_type)
    contender.resident, contender.outside = after[0] - before[0], after[1] - before[1]
    return contender


def measure_peak(contender: Contender, batch: Batch) -> None:
    """Of one step, without what the other contenders hold."""
    tokens = batch()
    others = memory(contender.device)[0] - contender.resident
    if contender.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    contender.step(tokens)
    step_profile.synchronise(contender.device)
    if contender.device == "cuda":
        contender.peak = torch.cuda.max_memory_allocated() - others


def run_in_turn(contenders: list[Contender], batch: Batch, rounds: int, steps: int, run_ahead: bool = False) -> None:
    """run_ahead: the host waits for the device only before the next contender, not after every step."""
    for _ in range(rounds):
        for contender in contenders:
            for _ in range(steps):
                contender.step(batch())
                if not run_ahead:
                    step_profile.synchronise(contender.device)
            contender.collect()


def figures(contender: Contender, tokens: int) -> dict[str, Any]:
    """Medians, of this rank.  Resident, peak and outside_allocator: GiB on this GPU; 0 on the CPU."""
    medians = {name: statistics.median(values) for name, values in contender.samples.items()}
    steps = contender.samples["step"]
    return {
        "step_ms": medians["step"],
        "step_ms_min_max": [min(steps), max(steps)],
        **{f"{name}_ms": medians[name] for name in PHASES},
        "host_ms": {name: medians[f"host_{name}"] for name in PHASES},
        "tokens_per_second_per_gpu": 1e3 * tokens / medians["step"],
        "resident_gib": contender.resident / 2**30,
        "peak_gib": contender.peak / 2**30,
        "outside_allocator_gib": contender.outside / 2**30,
    }


def compare(contenders: list[Contender], tokens: int) -> dict[str, dict[str, Any]]:
    """Collective.  A row a contender; ratio_to_adamw is the median over steps, against fully_shard on every layer."""
    rows = {c.name: figures(c, tokens) for c in contenders}
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, rows)
    steps = {c.name: c.samples["step"] for c in contenders}
    for name, row in rows.items():
        for key in ("step_ms", "optimizer_ms", "resident_gib", "peak_gib"):
            row[f"{key}_by_rank"] = [other[name][key] for other in ranks]
        baseline = None if name == ALONE else steps.get("adamw_" + name.split("_")[1])
        if baseline is not None:
            row["ratio_to_adamw"] = statistics.median(m / a for m, a in zip(steps[name], baseline, strict=True))
        row["samples_ms"] = next(c.samples for c in contenders if c.name == name)
    return rows


def profile_contender(contender: Contender, batch: Batch, args: argparse.Namespace, shape: str) -> dict[str, Any]:
    """Collective."""

    def step() -> HostSpans:
        return contender.step(batch())

    trace = args.out / f"trace_{contender.name}_{shape}_{dist.get_rank()}.json.gz" if args.trace else None
    warned = step_profile.synchronisation_warnings(step, contender.device)
    summary = step_profile.summarize(step_profile.record(step, contender.device, trace), args.communication)
    contender.discard()
    return {"synchronisation_warnings": warned} | summary


def measure_shape(contenders: list[Contender], shape: str, config: LlamaConfig, args: argparse.Namespace) -> dict:
    batch, tokens = make_batch(shape, config, args.device), int(shape.split("x")[0]) * int(shape.split("x")[1])
    for contender in contenders:
        measure_peak(contender, batch)
    run_in_turn(contenders, batch, rounds=1, steps=WARM_UP)
    for contender in contenders:
        contender.discard()
    run_in_turn(contenders, batch, args.rounds, args.steps, args.run_ahead)
    result: dict[str, Any] = {"contenders": compare(contenders, tokens) if args.rounds else {}}
    for contender in contenders:
        contender.discard()
    result["profiles"] = {
        c.name: profile_contender(c, batch, args, shape) for c in contenders if c.name in args.profile
    }
    if args.device == "cuda":
        torch.cuda.empty_cache()
    return result


def make_batch(shape: str, config: LlamaConfig, device: str) -> Batch:
    """`shape`: sequence x batch, as 2048x4; the rank's own random tokens, [batch, sequence]."""
    sequence, batch = map(int, shape.split("x"))
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    return lambda: torch.randint(0, config.vocab, (batch, sequence), device=device, generator=generator)


def start_libraries(device: str) -> None:
    """So that no contender is charged for what the process needs once."""
    x = torch.ones(64, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    (x @ x).sum().backward()
    dist.all_reduce(torch.zeros(1, device=device))


def describe(shape: str, result: dict[str, Any]) -> str:
    lines = [
        f"\n{shape} tokens a rank (sequence x batch); medians in ms; memory: the fullest rank's",
        "(host: to enqueue forward + backward / optimizer; outside: of torch's allocator)",
        f"{'':<24}{'step':>9}{'forward':>9}{'backward':>9}{'optim.':>9}{'host':>16}{'resident':>10}{'peak GiB':>10}"
        f"{'outside':>9}{'x AdamW':>9}",
    ]
    for name, row in result["contenders"].items():
        host = row["host_ms"]
        hosts = f"{host['forward'] + host['backward']:.1f} / {host['optimizer']:.1f}"
        phases = "".join(f"{row[f'{phase}_ms']:>9.2f}" for phase in PHASES)
        memory = f"{max(row['resident_gib_by_rank']):>10.2f}{max(row['peak_gib_by_rank']):>10.2f}"
        outside, ratio = row["outside_allocator_gib"], row.get("ratio_to_adamw", float("nan"))
        lines.append(f"{name:<24}{row['step_ms']:>9.2f}{phases}{hosts:>16}{memory}{outside:>9.2f}{ratio:>9.3f}")
    for name, summary in result["profiles"].items():
        lines.append(
            f"\nprofile of one step of {name}, {shape}; {summary['synchronisation_warnings']} synchronisation warnings"
        )
        lines.append(step_profile.describe(summary))
    return "\n".join(lines)


def contender_or_alone(text: str) -> str:
    return text if text == ALONE else contender_name(text)


def contender_name(text: str) -> str:
    kind, _, rest = text.partition("_")
    mode, *options = rest.split("_")
    known = {*RECIPES, *OPTIONS} if kind == "muon" else {"layers", "root"}
    if kind not in ("adamw", "muon") or mode not in ("z2", "z3") or not known.issuperset(options):
        raise argparse.ArgumentTypeError(f"expected adamw or muon, z2 or z3, and options of {sorted(known)}: {text}")
    return text


def token_shape(text: str) -> str:
    sides = text.split("x")
    if len(sides) != 2 or not all(side.isdigit() and int(side) > 0 for side in sides):
        raise argparse.ArgumentTypeError(f"expected SEQUENCExBATCH, as 2048x4, found {text}")
    return text


def make_parser(description: str, contenders: list[str], name: Callable = contender_name) -> argparse.ArgumentParser:
    """With the options that measure_shape needs; bench/scaling.py adds its own."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", nargs="+", type=name, default=contenders, metavar="NAME")
    parser.add_argument("--preset", choices=PRESETS, default="1b")
    parser.add_argument("--tokens", nargs="+", type=token_shape, default=["2048x4"], metavar="SEQUENCExBATCH")
    parser.add_argument("--rounds", type=int, default=5, help="0: only the profiles")
    parser.add_argument("--steps", type=int, default=4, help="per contender and round")
    parser.add_argument("--run-ahead", action="store_true", help="do not wait for the GPU after every step")
    parser.add_argument("--profile", nargs="+", type=name, default=[], metavar="NAME")
    parser.add_argument("--communication", default=step_profile.COMMUNICATION, help="pattern of such kernels' names")
    parser.add_argument("--trace", action="store_true", help="also write the chrome trace of each profile to --out")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="folder for the figures (JSON) and the picture")
    return parser


def read_arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    args = parser.parse_args()
    if args.trace and args.out is None:
        parser.error("--trace needs --out")
    if not args.rounds and not args.profile:
        parser.error("--rounds 0 needs --profile")
    args.contenders = list(dict.fromkeys([*args.contenders, *args.profile])) if args.rounds else args.profile
    return args


def start(device: str) -> DeviceMesh:
    rank = int(os.environ["LOCAL_RANK"])
    if device == "cuda":
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    else:
        dist.init_process_group("gloo")
    start_libraries(device)
    return init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("shard",))


def describe_setup(config: LlamaConfig, parameters: int, args: argparse.Namespace) -> dict[str, Any]:
    cuda = args.device == "cuda"
    return {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "ranks": dist.get_world_size(),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "dmuon": dmuon.__version__,
        "preset": args.preset,
        "model": vars(config),
        "parameters": parameters,
        "rounds": args.rounds,
        "steps": args.steps,
        "run_ahead": args.run_ahead,
    }


def write(result: dict[str, Any], out: Path, timed: bool) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "step_time.json").write_text(json.dumps(result, indent=1))
    if timed:
        try:
            plots.draw_steps(result["setup"], result["shapes"], out / "step_time.png")
        except ImportError:
            print("no matplotlib here, so no picture")


def main() -> None:
    args = read_arguments(make_parser(__doc__, CONTENDERS, contender_or_alone))
    mesh = start(args.device)
    config = PRESETS[args.preset]
    contenders = [
        build(name, mesh, config, make_batch(args.tokens[0], config, args.device)) for name in args.contenders
    ]
    parameters = sum(p.numel() for p in Llama(config).to("meta").parameters())
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"setup": describe_setup(config, parameters, args), "shapes": {}}
    if dist.get_rank() == 0:
        print(json.dumps(result["setup"]))
    for shape in args.tokens:
        result["shapes"][shape] = measure_shape(contenders, shape, config, args)
        if dist.get_rank() == 0:
            print(describe(shape, result["shapes"][shape]), flush=True)
            if args.out:
                write(result, args.out, args.rounds > 0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
