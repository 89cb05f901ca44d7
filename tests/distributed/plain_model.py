"""The model of the checkpoint tests, in plain torch: also for processes without dmuon."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from reference import VOCAB


class OddLayer(nn.Module):
    """Rows that 2, 3 and 4 do not divide, fewer rows than ranks, a tied and a frozen matrix, buffers."""

    def __init__(self, shared: nn.Parameter) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(10)
        self.up = nn.Linear(10, 7)
        self.down = nn.Linear(7, 10, bias=False)
        self.one = nn.Linear(10, 1, bias=False)
        self.three = nn.Linear(10, 3, bias=False)
        self.tied = nn.Linear(10, 10, bias=False)
        self.tied.weight = shared
        self.frozen = nn.Linear(10, 10, bias=False)
        self.frozen.weight.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("scratch", torch.zeros(5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        y = self.norm(x)
        x = x + self.down(torch.tanh(self.up(y))) * torch.sigmoid(self.one(y))
        x = x + F.pad(self.three(y), (0, 7))  # a gradient of full rank: of others Newton-Schulz magnifies the rounding
        return x + 0.1 * self.tied(x) + 0.1 * self.frozen(x)


class OddModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = nn.Parameter(torch.randn(10, 10) * 0.3)
        self.embedding = nn.Embedding(VOCAB, 10)
        self.layers = nn.ModuleList([OddLayer(shared) for _ in range(2)])
        self.head = nn.Linear(10, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
