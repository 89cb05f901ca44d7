"""Step time of dmuon's Muon against FSDP2 + AdamW on the same model: both in one process, interleaved, median, ratio.

    torchrun --standalone --nproc-per-node 2 bench/train_llm.py --out results

Every contender is built once, warmed up, and then timed in turn, a few steps at a time, so that a drifting machine
hurts all alike.  Also reported: the optimizer's share, bytes on the wire, peak memory, and whether forward or backward
make the host wait for the GPU (torch's synchronisation check set to error, and the profile's runtime calls).
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from llama import Llama, LlamaConfig
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile, record_function

import dmuon

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SYNCHRONISING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


@dataclass
class Contender:
    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    built_bytes: int
    steps: list[float] = field(default_factory=list)
    optimizer_steps: list[float] = field(default_factory=list)
    peak_bytes: int = 0

    def forward_backward(self, tokens: torch.Tensor) -> torch.Tensor:
        with record_function("forward"):
            logits = self.model(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
        with record_function("backward"):
            loss.backward()
        return loss

    def step(self, tokens: torch.Tensor) -> None:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        events[0].record()
        self.forward_backward(tokens)
        events[1].record()
        with record_function("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad()
        events[2].record()
        torch.cuda.synchronize()
        self.steps.append(events[0].elapsed_time(events[2]))
        self.optimizer_steps.append(events[1].elapsed_time(events[2]))


def build(name: str, mesh: DeviceMesh, config: LlamaConfig, root_only: bool) -> Contender:
    """`name`: adamw or muon, then z2 or z3, then maybe reproducible."""
    kind, mode, *rest = name.split("_")
    z3 = mode == "z3"
    before = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Llama(config)
    if kind == "muon":
        dmuon.dedicate_params(
            model,
            mesh,
            lambda n, p: p.ndim == 2 and "layers" in n,
            reshard_after_forward=z3,
            mp_policy=POLICY,
            reproducible=rest == ["reproducible"],
        )
    if not root_only or kind == "adamw":
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=POLICY, reshard_after_forward=z3)
    fully_shard(model, mesh=mesh, mp_policy=POLICY, reshard_after_forward=z3)
    if kind == "muon":
        optimizer: torch.optim.Optimizer = dmuon.Muon(model, lr=0.02, weight_decay=0.01)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return Contender(name, model, optimizer, torch.cuda.memory_allocated() - before)


def measure_peak(contender: Contender, tokens: torch.Tensor) -> None:
    """Peak of one step beyond what the other contenders hold."""
    others = torch.cuda.memory_allocated() - contender_bytes(contender)
    torch.cuda.reset_peak_memory_stats()
    contender.step(tokens)
    contender.peak_bytes = torch.cuda.max_memory_allocated() - others
    contender.steps.pop()
    contender.optimizer_steps.pop()


def contender_bytes(contender: Contender) -> int:
    """Bytes this contender holds between steps, by its distinct storages."""
    tensors = [t for p in contender.model.parameters() for t in (getattr(p, "_local_tensor", p), p.grad)]
    tensors += [v for state in contender.optimizer.state.values() for v in state.values()]
    tensors += [param._owned_data for param in dmuon.get_dedicated_params(contender.model)]
    storages = {}
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)
        if isinstance(local, torch.Tensor) and local.is_cuda:
            storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return sum(storages.values())


def synchronising_calls(contender: Contender, tokens: torch.Tensor, trace: Path | None) -> dict[str, list[str]]:
    """Runtime calls that block the host, by phase; torch's own check raises on the ones it knows."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    contender.forward_backward(tokens)
    torch.cuda.set_sync_debug_mode("default")
    contender.optimizer.zero_grad()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        contender.forward_backward(tokens)
        with record_function("optimizer"):
            contender.optimizer.step()
            contender.optimizer.zero_grad()
        torch.cuda.synchronize()
    if trace is not None:
        prof.export_chrome_trace(str(trace))
    found: dict[str, list[str]] = {}
    events = prof.events()
    for phase in ("forward", "backward", "optimizer"):
        spans = [e.time_range for e in events if e.name == phase and e.device_type == torch.autograd.DeviceType.CPU]
        found[phase] = [
            e.name
            for e in events
            if e.name in SYNCHRONISING
            and any(span.start <= e.time_range.start and e.time_range.end <= span.end for span in spans)
        ]
    return found


def host_time(contender: Contender, tokens: torch.Tensor) -> float:
    """Milliseconds the host spends to enqueue forward and backward."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    contender.forward_backward(tokens)
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    contender.optimizer.zero_grad()
    return 1e3 * elapsed


def report(contenders: list[Contender], tokens: torch.Tensor, out: Path | None, args: argparse.Namespace) -> dict:
    rows = {}
    for c in contenders:
        calls = synchronising_calls(c, tokens, out / f"{c.name}.json.gz" if out and args.trace == c.name else None)
        rows[c.name] = {
            "step_ms": statistics.median(c.steps),
            "step_ms_min_max": [min(c.steps), max(c.steps)],
            "optimizer_ms": statistics.median(c.optimizer_steps),
            "host_forward_backward_ms": statistics.median(host_time(c, tokens) for _ in range(5)),
            "tokens_per_second_per_gpu": 1e3 * tokens.numel() / statistics.median(c.steps),
            "resident_gib": contender_bytes(c) / 2**30,
            "peak_gib": c.peak_bytes / 2**30,
            "synchronising_calls": calls,
        }
    for name, row in rows.items():
        other = "adamw_" + name.split("_")[1]
        if name != other and other in rows:
            pairs = zip(by_name(contenders, name).steps, by_name(contenders, other).steps, strict=True)
            row["ratio_to_adamw"] = statistics.median(m / a for m, a in pairs)
    return rows


def by_name(contenders: list[Contender], name: str) -> Contender:
    return next(c for c in contenders if c.name == name)


def in_turn(contenders: list[Contender], make_tokens: Callable[[], torch.Tensor], rounds: int, steps: int) -> None:
    for _ in range(rounds):
        for contender in contenders:
            for _ in range(steps):
                contender.step(make_tokens())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", nargs="+", default=["adamw_z2", "muon_z2", "adamw_z3", "muon_z3"])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=5632)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="per contender and round")
    parser.add_argument("--root-only", action="store_true", help="recipe b: fully_shard on the root only")
    parser.add_argument("--trace", help="contender whose profile is written")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    args = parse()
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("shard",))
    config = LlamaConfig(dim=args.dim, hidden=args.hidden, layers=args.layers, heads=args.dim // 128)
    generator = torch.Generator("cuda").manual_seed(rank)

    def tokens() -> torch.Tensor:
        return torch.randint(0, config.vocab, (args.batch, args.seq), device="cuda", generator=generator)

    contenders = [build(name, mesh, config, args.root_only) for name in args.contenders]
    in_turn(contenders, tokens, rounds=1, steps=4)
    for contender in contenders:
        contender.steps.clear(), contender.optimizer_steps.clear()
        measure_peak(contender, tokens())
    in_turn(contenders, tokens, args.rounds, args.steps)
    if args.out and rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
    rows = report(contenders, tokens(), args.out if rank == 0 else None, args)
    if rank == 0:
        parameters = sum(p.numel() for p in contenders[0].model.parameters())
        header = {
            "gpu": torch.cuda.get_device_name(), "gpus": dist.get_world_size(), "torch": torch.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())), "dmuon": dmuon.__version__,
            "parameters": parameters, "batch_per_gpu": args.batch, "seq": args.seq, "root_only": args.root_only,
        }  # fmt: skip
        text = json.dumps({"setup": header, "contenders": rows}, indent=1)
        print(text)
        if args.out:
            (args.out / "train_llm.json").write_text(text)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
