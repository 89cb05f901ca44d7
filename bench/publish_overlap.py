"""HSDP: how much of the publish after a step is hidden by the next forward, from a profile of two GPUs (mesh 2x1).

    torchrun --standalone --nproc-per-node 2 bench/publish_overlap.py --out results

On that mesh the shard axis has one rank, so every broadcast is a publish and every reduction is stage 2.  Exposed time
is what is left of the publish kernels where no compute kernel runs.  Writes the figures and a picture of the timeline
from the optimizer step to the end of the next forward.
"""

import argparse
import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from intervals import Spans, exposed, length, union
from llama import Llama, LlamaConfig
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile, record_function

import dmuon

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclass
class Kernels:
    """[start, end] in microseconds."""

    compute: Spans
    publish: Spans
    phases: dict[str, tuple[float, float]]


def build(config: LlamaConfig, replicate_async: bool) -> tuple[Llama, dmuon.Muon]:
    mesh = init_device_mesh("cuda", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Llama(config)
    dmuon.dedicate_params(
        model,
        mesh["shard"],
        lambda n, p: p.ndim == 2 and "layers" in n,
        replicate_mesh=mesh["replicate"],
        mp_policy=POLICY,
    )
    fully_shard(model, mesh=mesh, mp_policy=POLICY)
    return model, dmuon.Muon(model, lr=0.02, weight_decay=0.01, replicate_async=replicate_async)


def forward_backward(model: Llama, tokens: torch.Tensor) -> None:
    with record_function("forward"):
        loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
    with record_function("backward"):
        loss.backward()


def step(model: Llama, optimizer: dmuon.Muon, tokens: torch.Tensor) -> None:
    forward_backward(model, tokens)
    with record_function("optimizer"):
        optimizer.step()
        optimizer.zero_grad()


def record(model: Llama, optimizer: dmuon.Muon, tokens: torch.Tensor, trace: Path) -> Kernels:
    """From the middle of a step to the middle of the next; the first profile only warms the profiler up."""
    for _ in range(2):
        forward_backward(model, tokens)
        torch.cuda.synchronize()
        dist.barrier()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
            with record_function("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
            with record_function("forward"):
                loss = model(tokens).float().mean()
            torch.cuda.synchronize()
        loss.backward()
        optimizer.zero_grad()
    prof.export_chrome_trace(str(trace))
    return read_trace(trace)


def read_trace(trace: Path) -> Kernels:
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("ph") == "X"]
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]

    def spans(wanted) -> Spans:
        return sorted((float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in kernels if wanted(e["name"]))

    phases = {
        e["name"]: (float(e["ts"]), float(e["ts"]) + float(e["dur"]))
        for e in events
        if e.get("cat") == "gpu_user_annotation" and e["name"] in ("optimizer", "forward")
    }
    return Kernels(
        spans(lambda name: "nccl" not in name),
        spans(lambda name: "nccl" in name and "Broadcast" in name),
        phases,
    )


def summarize(kernels: Kernels) -> dict[str, float]:
    publish, bare = length(kernels.publish), exposed(kernels.publish, kernels.compute)
    return {
        "publish_kernels": len(kernels.publish),
        "publish_ms": publish / 1e3,
        "exposed_ms": bare / 1e3,
        "exposed_percent": 100.0 * bare / publish,
        "span_ms": (max(e for _, e in kernels.compute) - min(s for s, _ in kernels.compute)) / 1e3,
    }


def draw(recorded: dict[str, Kernels], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(recorded), 1, figsize=(11, 2.1 * len(recorded)), sharex=True)
    for axis, (name, kernels) in zip(axes, recorded.items(), strict=True):
        origin = min(start for start, _ in kernels.compute)
        rows = [(kernels.compute, "compute", "#4878a8"), (kernels.publish, "publish", "#d1603d")]
        for row, (spans, _, colour) in enumerate(rows):
            bars = [((start - origin) / 1e3, (end - start) / 1e3) for start, end in union(spans)]
            axis.broken_barh(bars, (row - 0.4, 0.8), facecolors=colour)
        axis.set_yticks(range(len(rows)), [label for _, label, _ in rows])
        axis.invert_yaxis()
        axis.set_title(f"replicate_async={name == 'async'}", loc="left", fontsize=10)
        if "forward" in kernels.phases:
            axis.axvline((kernels.phases["forward"][0] - origin) / 1e3, color="black", linewidth=0.8, linestyle="--")
    axes[-1].set_xlabel("ms from the start of optimizer.step(); dashed: the next forward begins")
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--out", type=Path, default=Path("publish_overlap"))
    args = parser.parse_args()
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    args.out.mkdir(parents=True, exist_ok=True)
    config = LlamaConfig(dim=2048, hidden=5632, layers=args.layers, heads=16)
    tokens = torch.randint(0, config.vocab, (args.batch, args.seq), device="cuda")
    recorded = {}
    for name in ("async", "sync"):
        model, optimizer = build(config, name == "async")
        for _ in range(3):
            step(model, optimizer, tokens)
        recorded[name] = record(model, optimizer, tokens, args.out / f"trace_{name}_{rank}.json")
        del model, optimizer
        torch.cuda.empty_cache()
    (args.out / f"trace_async_{rank}.json").unlink(), (args.out / f"trace_sync_{rank}.json").unlink()
    figures = {name: summarize(kernels) for name, kernels in recorded.items()}
    print(f"rank {rank}", json.dumps(figures, indent=1))
    (args.out / f"rank{rank}.json").write_text(json.dumps(figures, indent=1))
    if rank == 0:
        (args.out / "kernels.json").write_text(json.dumps({name: vars(k) for name, k in recorded.items()}))
        try:
            draw(recorded, args.out / "publish_overlap.png")
        except ImportError:
            print("no matplotlib here: draw kernels.json elsewhere")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
