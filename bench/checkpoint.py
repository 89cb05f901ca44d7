"""Save and load time of dmuon next to FSDP2 + AdamW: same model, one process, in turn; median, ratio, extra memory.

    torchrun --standalone --nproc-per-node 2 bench/checkpoint.py --folder /fast/disk --out results          (GPUs)
    torchrun --standalone --nproc-per-node 2 bench/checkpoint.py --layers 2 --dim 128 --hidden 256 --vocab 500  (CPU)

FSDP2 saves its sharded state dict with torch.distributed.checkpoint, flushed to disk as by default, and loads it with
set_state_dict; dmuon uses save_checkpoint and load_checkpoint, checksums included.  `extra_bytes` is the device's peak
above what was allocated before the call.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from llama import Llama, LlamaConfig
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import dmuon

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclass
class Contender:
    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"save": [], "load": []})
    extra_bytes: dict[str, int] = field(default_factory=lambda: {"save": 0, "load": 0})
    file_bytes: int = 0

    def save(self, path: Path) -> None:
        if isinstance(self.optimizer, dmuon.Muon):
            dmuon.save_checkpoint(path, self.model, self.optimizer)
            return
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)

    def load(self, path: Path) -> None:
        if isinstance(self.optimizer, dmuon.Muon):
            dmuon.load_checkpoint(path, self.model, self.optimizer)
            return
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer}
        dcp.load(state, checkpoint_id=path)
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)


def build(name: str, mesh: DeviceMesh, config: LlamaConfig) -> Contender:
    torch.manual_seed(0)
    with torch.device(mesh.device_type):
        model = Llama(config)
    if name == "muon":
        dmuon.dedicate_params(model, mesh, lambda n, p: p.ndim == 2 and "layers" in n, mp_policy=POLICY)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=POLICY)
    fully_shard(model, mesh=mesh, mp_policy=POLICY)
    optimizer = dmuon.Muon(model) if name == "muon" else torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, config.vocab, (1, 64), device=mesh.device_type)
    model(tokens).float().logsumexp(-1).mean().backward()  # one step, so that all state exists
    optimizer.step()
    optimizer.zero_grad()
    return Contender(name, model, optimizer)


def timed(contender: Contender, what: str, act: Callable[[], None], device: torch.device) -> None:
    """Wall time of the slowest rank, and this rank's peak of device memory above the start."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if cuda else 0
    dist.barrier()
    start = time.perf_counter()
    act()
    if cuda:
        torch.cuda.synchronize()
    elapsed = torch.tensor(time.perf_counter() - start, device=device)
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    contender.seconds[what].append(elapsed.item())
    peak = torch.cuda.max_memory_allocated() - before if cuda else 0
    contender.extra_bytes[what] = max(contender.extra_bytes[what], peak)


def run(contender: Contender, folder: Path, device: torch.device) -> None:
    path = folder / contender.name
    timed(contender, "save", lambda: contender.save(path), device)
    contender.file_bytes = sum(file.stat().st_size for file in path.iterdir())
    timed(contender, "load", lambda: contender.load(path), device)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path)
    dist.barrier()


def report(contenders: list[Contender], config: LlamaConfig, device: torch.device) -> dict:
    muon, adamw = contenders
    largest = torch.tensor([max(c.extra_bytes[what] for c in [muon]) for what in ("save", "load")], device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    rows = {
        c.name: {
            "file_gib": c.file_bytes / 2**30,
            **{f"{what}_seconds": statistics.median(c.seconds[what]) for what in ("save", "load")},
            **{f"{what}_seconds_min_max": [min(c.seconds[what]), max(c.seconds[what])] for what in ("save", "load")},
            **{f"{what}_extra_mib": c.extra_bytes[what] / 2**20 for what in ("save", "load")},
        }
        for c in contenders
    }
    for what in ("save", "load"):
        pairs = zip(muon.seconds[what], adamw.seconds[what], strict=True)
        rows["muon"][f"{what}_ratio_to_adamw"] = statistics.median(m / a for m, a in pairs)
    rows["muon"]["extra_mib_of_all_ranks"] = [size / 2**20 for size in largest.tolist()]
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else "none"
    setup = {
        "gpu": gpu, "ranks": dist.get_world_size(), "torch": torch.__version__, "dmuon": dmuon.__version__,
        "parameters": sum(p.numel() for p in muon.model.parameters()),
        "largest_matrix_mib": 4 * config.dim * max(config.dim, config.hidden) / 2**20,
    }  # fmt: skip
    return {"setup": setup, "contenders": rows}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=5632)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where checkpoints go, and are removed again; default: a new one")
    parser.add_argument("--out", type=Path, help="folder for checkpoint.json")
    return parser.parse_args()


def start() -> torch.device:
    cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    return device


def in_turn(contenders: list[Contender], folder: Path, rounds: int, device: torch.device) -> None:
    for number in range(rounds + 1):
        for contender in contenders if number % 2 else reversed(contenders):
            run(contender, folder, device)
        if number == 0:  # warm-up
            for contender in contenders:
                contender.seconds = {"save": [], "load": []}


def main() -> None:
    args = parse()
    device = start()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("shard",))
    config = LlamaConfig(args.dim, args.hidden, args.layers, max(1, args.dim // 128), args.vocab)
    folders = [tempfile.mkdtemp(dir=args.folder) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folders, src=0)
    contenders = [build(name, mesh, config) for name in ("muon", "adamw")]
    in_turn(contenders, Path(folders[0]), args.rounds, device)
    result = report(contenders, config, device)
    if dist.get_rank() == 0:
        shutil.rmtree(folders[0])
        print(text := json.dumps(result, indent=1))
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / "checkpoint.json").write_text(text)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
