"""Trains, saves every few steps, and goes on from the last checkpoint: model, optimizer, scheduler and data order.

    torchrun --nproc-per-node 4 examples/resume.py --folder checkpoints --steps 30
    torchrun --nproc-per-node 2 examples/resume.py --folder checkpoints --steps 60    (on 2 ranks, from step 30 on)

Stop it at any moment, kill -9 included, and start it again: it goes on from the last step that was saved.  On the same
number of ranks the losses are those of a run that was never stopped, bit for bit.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon

SAMPLES, BATCH, WIDTH = 4096, 48, 32


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


class Batches:
    """An endless shuffled reading of the data.  Its state is the place in it, the same on every rank."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(SAMPLES, WIDTH, generator=generator)
        self.y = self.x[:, :8].prod(1, keepdim=True).sign()
        self.epoch, self.position = 0, 0

    def next(self, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's part of the next global batch."""
        if self.position + BATCH > SAMPLES:
            self.epoch, self.position = self.epoch + 1, 0
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch))
        mine = order[self.position : self.position + BATCH].tensor_split(ranks)[rank]
        self.position += BATCH
        return self.x[mine], self.y[mine]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))
    torch.manual_seed(0)
    model = Net()
    dmuon.dedicate_params(model, mesh, lambda name, p: p.ndim == 2 and "layers" in name)
    fully_shard(model, mesh=mesh)
    optimizer = dmuon.Muon(model, lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
    batches = Batches()
    path, step = args.folder / "last", 0

    if path.exists():
        extra = {"scheduler": scheduler.state_dict(), "batches": batches.state_dict(), "step": 0}
        extra = dmuon.load_checkpoint(path, model, optimizer, extra=extra)
        scheduler.load_state_dict(extra["scheduler"])
        batches.load_state_dict(extra["batches"])
        step = extra["step"]
    while step < args.steps:
        x, y = batches.next(rank, ranks)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        step += 1
        dist.all_reduce(loss.detach().div_(ranks))
        if rank == 0:
            print(f"step {step}  loss {loss.item():.9f}  lr {scheduler.get_last_lr()[0]:.9f}", flush=True)
        if step % args.every == 0:
            extra = {"scheduler": scheduler.state_dict(), "batches": batches.state_dict(), "step": step}
            dmuon.save_checkpoint(path, model, optimizer, extra=extra, overwrite=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
