"""Whether training on a mesh is right: against one process in plain torch, and async against sync publishes.

Used by scaling.py --check.  The plain side knows no mesh: it sees the batches of all ranks, averages their gradients
and updates whole matrices.  It shares Newton-Schulz and the mixed precision with dmuon, and nothing else.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from llama import Llama, LlamaConfig
from scaling_measure import settle
from scaling_model import Shape
from step_time import POLICY, Contender, construct, is_matrix
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call

import dmuon

STEPS = 6
TOLERANCE = 3e-4
"""Of a loss, relative: sums of ranks in another order move a 16-bit weight to its neighbour now and then.  A learning
rate that is 1 % off makes 1e-3, one rank whose data does not count 5e-2.
"""
LR, WEIGHT_DECAY, MOMENTUM = 0.02, 0.01, 0.95
"""What step_time.py's Muon has; MOMENTUM is dmuon's default."""


def tokens_of(step: int, rank: int, config: LlamaConfig, device: str) -> torch.Tensor:
    """Distinct for every step and rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, config.vocab, (2, 16), generator=generator).to(device)


class Plain:
    def __init__(self, config: LlamaConfig, device: str) -> None:
        torch.manual_seed(0)
        with torch.device(device):
            self.model = Llama(config)
        named = dict(self.model.named_parameters())
        self.matrices = {p: torch.zeros_like(p) for name, p in named.items() if is_matrix(name, p)}
        rest = [p for name, p in named.items() if not is_matrix(name, p)]
        self.adamw = torch.optim.AdamW(rest, lr=1e-3, weight_decay=0.01)

    def backward(self, tokens: torch.Tensor, ranks: int) -> float:
        cast = {name: p.to(POLICY.param_dtype) for name, p in self.model.named_parameters()}
        logits = functional_call(self.model, cast, (tokens,))
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
        loss.backward()
        return loss.item() / ranks

    @torch.no_grad()
    def step(self, ranks: int) -> None:
        for p in self.model.parameters():
            p.grad /= ranks
        for p, momentum in self.matrices.items():
            momentum.mul_(MOMENTUM).add_(p.grad)
            update = dmuon.newton_schulz(p.grad + MOMENTUM * momentum)
            p.mul_(1 - LR * WEIGHT_DECAY).sub_(LR * 0.2 * max(p.shape) ** 0.5 * update)
        self.adamw.step()
        self.model.zero_grad()


def plain_losses(config: LlamaConfig, device: str) -> list[float]:
    """Means over the ranks, step by step; every rank computes them for itself."""
    plain, ranks = Plain(config, device), dist.get_world_size()
    losses = []
    for step in range(STEPS):
        losses.append(sum(plain.backward(tokens_of(step, rank, config, device), ranks) for rank in range(ranks)))
        plain.step(ranks)
    return losses


def train(contender: Contender, config: LlamaConfig) -> list[float]:
    """Likewise; ends with an evaluation, so that the last publish counts."""
    losses = []
    for step in range(STEPS):
        tokens = tokens_of(step, dist.get_rank(), config, contender.device)
        loss = contender.loss(tokens)
        loss.backward()
        contender.optimizer.step()
        contender.optimizer.zero_grad()
        losses.append(loss.detach())
    with torch.no_grad():
        losses.append(contender.loss(tokens))
    total = torch.stack(losses)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def same_on_all_ranks(same: bool, device: str) -> bool:
    flag = torch.tensor(int(same), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag)


def masters(contender: Contender) -> list[torch.Tensor]:
    return [p.parameter.detach() for p in dmuon.get_dedicated_params(contender.model) if p.is_owner]


def check_contender(name: str, mesh: DeviceMesh, config: LlamaConfig, expected: list[float]) -> dict[str, Any]:
    contenders = [construct(name, mesh, config) for _ in range(2)]
    contenders[1].optimizer.replicate_async = False
    losses = [train(contender, config) for contender in contenders]
    dmuon.check_invariants(contenders[0].model)
    same = all(torch.equal(a, b) for a, b in zip(*map(masters, contenders), strict=True))
    settle(mesh.device_type)
    return {
        "contender": name,
        "loss": losses[0][STEPS - 1],
        "plain_loss": expected[-1],
        "relative_error": max(abs(a - b) / b for a, b in zip(losses[0], expected, strict=False)),
        "async_is_sync": same_on_all_ranks(same and losses[0] == losses[1], mesh.device_type),
    }


def check(shapes: list[Shape], config: LlamaConfig, device: str, names: list[str]) -> list[dict[str, Any]]:
    """Collective.  A row a mesh and contender of dmuon.  The caller picks attention whose backward repeats its bits."""
    expected = plain_losses(config, device)
    meshes = {str(shape): shape.make(device) for shape in shapes}
    return [
        {"mesh": shape} | check_contender(name, mesh, config, expected)
        for shape, mesh in meshes.items()
        for name in names
    ]


def passed(row: dict[str, Any]) -> bool:
    return row["relative_error"] <= TOLERANCE and row["async_is_sync"]
