"""Trains a small byte-level GPT on the sources of Python's standard library: FSDP2 with AdamW, then with dmuon's Muon.

    python examples/train_gpt.py [--steps N] [--layers N] [--dim N] [--z2] ...

Both runs have the same initial weights, batches, number of steps and learning-rate schedule.  Every rank sees batches
of its own.  Without GPUs: 4 ranks on CPU over gloo; with GPUs: one rank each, up to 4, over NCCL, computing in bf16.
Prints who owns what and what it cost, both loss curves, speed and memory; writes demo.json and demo.png.
Exits with 1 if Muon's final validation loss is not the lower one.
"""

import argparse
import json
import math
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from demo_measure import PeakMemory, StepperClock, TrainingClock, watch_own_memory
from demo_report import describe_machine, print_report, save_figure
from gpt import GPT, GPTConfig
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from stdlib_text import Batches, load_text, validation_batches
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

RUNS = {"adamw": "FSDP2 + AdamW", "muon": "FSDP2 + dmuon Muon"}
VALIDATIONS = 10
VALIDATION_BYTES = 16384
# The best of a grid over the default model and 200 steps, by final validation loss; docs/performance.md has the grid.
ADAMW = {"lr": 4e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}
ADAMW_MAX_NORM = 0.25
MUON = {"lr": 2e-2, "weight_decay": 0.1, "adamw_lr": 1.6e-2, "adamw_betas": (0.9, 0.95), "adamw_weight_decay": 0.1}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=128, help="width; a multiple of 32")
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank and step")
    parser.add_argument("--seq", type=int, default=128, help="bytes per sequence")
    parser.add_argument("--z2", action="store_true", help="keep gathered weights until backward (Z2 instead of Z3)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, help="default: 4 on CPU; with GPUs one per GPU, up to 4")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for demo.json and demo.png")
    parser.add_argument("--optimizer", choices=RUNS, help=argparse.SUPPRESS)  # these two: how main() starts the ranks
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.steps < 3:
        parser.error("--steps must be at least 3")
    return args


# ---- one run, as one rank sees it ---------------------------------------------------------------------------------


def with_adamw(model: GPT, mesh: DeviceMesh, **fsdp_options) -> torch.optim.Optimizer:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **fsdp_options)
    fully_shard(model, mesh=mesh, **fsdp_options)
    return torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)


def with_muon(model: GPT, mesh: DeviceMesh, **fsdp_options) -> tuple[torch.optim.Optimizer, list[tuple]]:
    """Also returns the plan's (predicted seconds, bytes, matrices) for each owner."""
    import dmuon

    assignment = dmuon.dedicate_params(model, mesh, lambda name, p: p.ndim == 2 and "layers" in name, **fsdp_options)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **fsdp_options)
    fully_shard(model, mesh=mesh, **fsdp_options)
    return dmuon.Muon(model, **MUON), assignment.loads()


def learning_rate_factor(steps: int, step: int) -> float:
    """Warm-up over the first tenth, then a cosine down to a tenth."""
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.55 + 0.45 * math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up))


@torch.no_grad()
def validate(model: GPT, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Mean loss over the held-out windows of all ranks, in nats per byte."""
    mean = torch.stack([model(tokens, targets) for tokens, targets in batches]).mean()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def train(args: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> dict:
    """One whole run.  Returns what this rank measured."""
    rank, ranks = mesh.get_local_rank(), mesh.size()
    train_text, held_out = load_text()
    batches = Batches(train_text, args.seq, args.batch, rank, args.seed, device)
    validation = validation_batches(held_out, args.seq, args.batch, (rank, ranks), VALIDATION_BYTES, device)
    memory = PeakMemory(device)

    torch.manual_seed(args.seed)
    model = GPT(GPTConfig(args.layers, args.dim, args.seq)).to(device)
    options: dict = {"reshard_after_forward": not args.z2}
    if device.type == "cuda":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    result: dict = {"validation": []}
    if args.optimizer == "muon":
        optimizer, loads = with_muon(model, mesh, **options)
        result["load"] = loads[rank]
        stepper_clock = StepperClock(optimizer, device)
        own_memory = watch_own_memory(model)
    else:
        optimizer = with_adamw(model, mesh, **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(args.steps, step))

    clock = TrainingClock(device)
    with progress_bar(rank) as bar:
        task = bar.add_task(RUNS[args.optimizer], total=args.steps, note="")

        def record_validation(step: int) -> None:
            loss = validate(model, validation)
            result["validation"].append({"step": step, "seconds": clock.seconds, "loss": loss})
            bar.update(task, note=f"validation loss {loss:.3f}")

        every = max(1, args.steps // VALIDATIONS)
        for begin in range(0, args.steps, every):
            record_validation(begin)
            with clock:
                for step in range(begin, min(begin + every, args.steps)):
                    model(*batches[step]).backward()
                    if args.optimizer == "adamw":  # Newton-Schulz does not look at the scale of a gradient
                        nn.utils.clip_grad_norm_(model.parameters(), ADAMW_MAX_NORM)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                    bar.advance(task)
        record_validation(args.steps)

    result["peak_bytes"] = memory.bytes()
    if args.optimizer == "muon":
        result["matrix_ms"] = stepper_clock.mean_ms(args.steps)
        result["own_memory"] = own_memory()
    return result


def progress_bar(rank: int) -> Progress:
    columns = (TextColumn("{task.description:20}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, TextColumn("{task.fields[note]}"), refresh_per_second=2, disable=rank != 0)


def run_on_this_rank(args: argparse.Namespace) -> None:
    """What torchrun starts.  Rank 0 writes every rank's result to args.result."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    results = [None] * dist.get_world_size()
    dist.all_gather_object(results, train(args, mesh, device))
    if dist.get_rank() == 0:
        args.result.write_text(json.dumps(results))
    dist.barrier()
    # Not the ordinary way out: a gloo thread that still holds a tensor can abort an interpreter that is shutting down.
    sys.stdout.flush()
    os._exit(0)


# ---- both runs ----------------------------------------------------------------------------------------------------


def launch(run: str, ranks: int) -> list[dict]:
    """Runs this program again on `ranks` ranks, so that each run's memory is measured in fresh processes."""
    from torch.distributed.run import main as torchrun

    if not torch.cuda.is_available():
        os.environ["OMP_NUM_THREADS"] = "1"  # ranks share the cores
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        to_each_rank = [__file__, *sys.argv[1:], "--optimizer", run, "--result", str(result)]
        torchrun(["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}", *to_each_rank])
        return json.loads(result.read_text())


def main() -> int:
    args = parse_arguments()
    if args.optimizer:
        run_on_this_rank(args)
        return 0
    ranks = args.ranks or min(4, torch.cuda.device_count() or 4)
    settings = {
        "ranks": ranks,
        **{key: getattr(args, key) for key in ("steps", "layers", "dim", "batch", "seq", "seed", "z2")},
        "adamw": ADAMW | {"max_norm": ADAMW_MAX_NORM},
        "muon": MUON,
    }
    demo = {"machine": describe_machine(), "settings": settings, "names": RUNS}
    demo["runs"] = {run: launch(run, ranks) for run in RUNS}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "demo.json").write_text(json.dumps(demo, indent=1))
    save_figure(demo, args.out / "demo.png")
    return 0 if print_report(demo) else 1


if __name__ == "__main__":
    sys.exit(main())
