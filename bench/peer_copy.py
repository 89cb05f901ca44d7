"""Time of one group's gather and reduction with NCCL and with copies from peers, alone and under a large product.

    torchrun --standalone --nproc-per-node 2 bench/peer_copy.py
    torchrun --standalone --nproc-per-node 4 bench/peer_copy.py --mib 100 --rounds 30 --out results

The group is --mib MiB of bf16, an equal share a rank.  Gathered in bf16; summed in fp32, which NCCL sends and peers do
not.  All contenders are timed in turn, round after round; medians, and the ratio of the medians to NCCL's.  Under a
product: another stream multiplies 8192 x 8192 in bf16 all the while, and `product` is how long one such product takes.
"""

import argparse
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import dmuon  # noqa: F401 (loads the library)

SIZE = 8192
PRODUCTS = 4
"""Queued before a call, so that it starts and ends among them."""
Samples = dict[str, list[float]]


class Contender:
    """One way to gather and to reduce a group of `elements`."""

    def __init__(self, comm: str, group: str, elements: int) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        device = torch.device("cuda", rank)
        self.gathers, self.sums = (
            torch.classes.dmuon.Communicator((group, group, comm, False), device, False) for _ in range(2)
        )
        self.roots = list(range(size))
        share = elements // size
        self.shared = self.gathers.share(False, 2 * share)
        self.weights = [torch.ones(share, dtype=torch.bfloat16, device=device) for _ in self.roots]
        self.places = [-1] * size
        if self.shared is not None:
            self.weights[rank] = self.shared[: 2 * share].view(torch.bfloat16)
            self.places = [0] * size
        outgoing = self.sums.share(True, 2 * elements + 256 * size)
        self.peers = outgoing is not None
        self.parts = [torch.ones(share, dtype=torch.float32, device=device) for _ in self.roots]
        if outgoing is not None:
            places = self.sums.outgoing_places(self.roots, [share] * size, 2)
            for root, place in enumerate(places):
                if root != rank:
                    self.parts[root] = outgoing[place : place + 2 * share].view(torch.bfloat16)

    def gather(self) -> None:
        self.gathers.broadcast(self.roots, self.weights, self.places)

    def reduce(self) -> None:
        if self.peers:
            self.sums.reduce_shared(self.roots, self.parts, torch.bfloat16, 1.0)
        else:
            self.sums.reduce(self.roots, self.parts)


class Clock:
    """Times calls on a high-priority stream, alone or beside products on another one."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream(priority=-1)
        self.factors = torch.randn(2, SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
        self.product = torch.empty(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)

    def multiply(self, count: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        for _ in range(count):
            torch.mm(self.factors[0], self.factors[1], out=self.product)
        events[1].record()
        return events[0], events[1]

    def time(self, call: Callable[[], None], products: int) -> tuple[float, float]:
        """Milliseconds of the call, and of one product beside it."""
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        around = self.multiply(products)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self.stream):
            begin.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end), around[0].elapsed_time(around[1]) / max(products, 1)


def measure(contenders: dict[str, Contender], clock: Clock, rounds: int) -> Samples:
    samples: Samples = {}
    for number in range(rounds + 3):
        for products in (0, PRODUCTS):
            for name, contender in contenders.items():
                for kind, call in (("gather", contender.gather), ("reduce", contender.reduce)):
                    took, product = clock.time(call, products)
                    if number < 3:  # warm-up
                        continue
                    label = f"{name} {kind}" + (" under products" if products else "")
                    samples.setdefault(label, []).append(took)
                    if products:
                        samples.setdefault(f"product beside {name} {kind}", []).append(product)
            if products and number >= 3:
                samples.setdefault("product alone", []).append(clock.time(lambda: None, products)[1])
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, help="folder for peer_copy.json")
    args = parser.parse_args()
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    elements = args.mib * 2**19 // (8 * mesh.size()) * 8 * mesh.size()
    group = mesh.get_group().group_name
    contenders = {comm: Contender(comm, group, elements) for comm in ("nccl", "peer")}
    medians = {name: statistics.median(values) for name, values in measure(contenders, Clock(), args.rounds).items()}
    if rank == 0:
        print(f"{args.mib} MiB of bf16 over {mesh.size()} ranks; medians in ms on rank 0")
        for name, median in medians.items():
            baseline = medians.get(name.replace("peer", "nccl"))
            ratio = f"{median / baseline:>8.2f} x nccl" if "peer" in name and baseline else ""
            print(f"{name:<36}{median:>9.3f}{ratio}")
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / "peer_copy.json").write_text(json.dumps(medians, indent=1))
    del contenders
    torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
