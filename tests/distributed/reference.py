"""One process in plain torch: what every distributed run is compared with.

Nothing of dmuon is used here.  The reference sees the batches of all ranks, averages their gradients, and runs exact
Muon on the matrices and torch's AdamW on the rest.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call

VOCAB = 61
POLAR_EXPRESS = [
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
]


class Block(nn.Module):
    """Matrices of several aspects: square, tall, wide."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mix = nn.Linear(dim, dim, bias=False)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix(x)
        return x + self.down(F.gelu(self.up(self.norm(x))))


class TinyModel(nn.Module):
    def __init__(self, dim: int = 24, hidden: int = 56, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, dim)
        self.layers = nn.ModuleList([Block(dim, hidden) for _ in range(layers)])
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens.to(device_of(self)))  # FSDP2 does it, where there is one
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def device_of(model: nn.Module) -> torch.device:
    """Where it computes; placeholders are on the meta device."""
    return next(p.device for p in model.parameters() if not p.is_meta)


def is_matrix(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim == 2 and "layers" in name


def batch(seed: int, rank: int, size: int = 4) -> torch.Tensor:
    """Distinct tokens for every (seed, rank)."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(0, VOCAB, (size, 9), generator=generator)


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten().to(logits.device))


def newton_schulz(x: torch.Tensor, coefficients: list[tuple[float, float, float]], gram: bool) -> torch.Tensor:
    """Polynomial iteration on one matrix, fp32; `gram` iterates on X X^T with a restart before the third step."""
    transposed = x.shape[0] > x.shape[1]
    x = x.T if transposed else x
    x = x / x.norm().clamp_min(1e-30)  # a gradient may be zero
    if not gram:
        for a, b, c in coefficients:
            r = x @ x.T
            x = a * x + (b * r + c * r @ r) @ x
        return x.T if transposed else x
    for segment in (coefficients[:2], coefficients[2:]):
        r, q = x @ x.T, torch.eye(x.shape[0], device=x.device)
        for a, b, c in segment:
            h = a * torch.eye(x.shape[0], device=x.device) + b * r + c * r @ r
            q, r = q @ h, h @ r @ h
        x = q @ x
    return x.T if transposed else x


@dataclass
class MuonSettings:
    lr: float = 0.005
    momentum: float = 0.95
    weight_decay: float = 0.01
    nesterov: bool = True
    adamw_lr: float = 1e-3
    safety: float = 1.05

    def coefficients(self) -> list[tuple[float, float, float]]:
        s = self.safety
        return [(a / s, b / s**3, c / s**5) for a, b, c in POLAR_EXPRESS]


class Reference:
    """Trains a copy of `model` on the batches of all ranks."""

    def __init__(
        self,
        model: nn.Module,
        settings: MuonSettings,
        dtype: torch.dtype | None = None,
        predicate: Callable[[str, nn.Parameter], bool] = is_matrix,
    ) -> None:
        self.model = model
        self.settings = settings
        self.dtype = dtype
        self.matrices = {n: p for n, p in model.named_parameters() if predicate(n, p) and p.requires_grad}
        rest = [p for n, p in model.named_parameters() if not predicate(n, p)]
        self.adamw = torch.optim.AdamW(rest, lr=settings.adamw_lr, weight_decay=0.01, foreach=True) if rest else None
        self.momentum: dict[str, torch.Tensor] = {}

    def __call__(self, *args, **kwargs):
        """The model with its weights cast to the compute dtype, differentiable with respect to the masters."""
        device = next(self.model.parameters()).device
        args = tuple(arg.to(device) if isinstance(arg, torch.Tensor) else arg for arg in args)
        if self.dtype is None:
            return self.model(*args, **kwargs)
        cast = {n: p.to(self.dtype) for n, p in self.model.named_parameters()}
        return functional_call(self.model, cast, args, kwargs)

    @contextmanager
    def mean_over(self, ranks: int) -> Iterator[None]:
        """Backwards inside, one for each rank, add their mean to `.grad`; divided in fp32, after low-precision
        arithmetic.
        """
        before = {p: p.grad for p in self.model.parameters()}
        self.model.zero_grad()
        yield
        for p, grad in before.items():
            if p.grad is not None:
                p.grad.div_(ranks)
            if grad is not None:
                p.grad = grad if p.grad is None else grad + p.grad

    def backward(self, losses: Iterable[torch.Tensor], ranks: int) -> None:
        with self.mean_over(ranks):
            for loss in losses:
                loss.backward()

    @torch.no_grad()
    def step(self) -> None:
        s = self.settings
        for name, p in self.matrices.items():
            if p.grad is None:
                continue
            buffer = self.momentum.setdefault(name, torch.zeros_like(p))
            buffer.mul_(s.momentum).add_(p.grad)
            x = p.grad + s.momentum * buffer if s.nesterov else buffer
            rows, cols = p.shape
            u = newton_schulz(x, s.coefficients(), gram=max(rows, cols) / min(rows, cols) >= 1.3)
            p.mul_(1 - s.lr * s.weight_decay)
            p.sub_(s.lr * 0.2 * max(rows, cols) ** 0.5 * u)
        if self.adamw is not None:
            self.adamw.step()

    def zero_grad(self) -> None:
        self.model.zero_grad()


def relative_error(value: torch.Tensor, expected: torch.Tensor) -> float:
    value, expected = value.cpu().double(), expected.cpu().double()
    return ((value - expected).norm() / expected.norm().clamp_min(1e-30)).item()
