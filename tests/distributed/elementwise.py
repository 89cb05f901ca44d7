"""A small transformer with every kind of parameter, for the tests of `elementwise=`; in plain torch."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from reference import VOCAB

DIM, HEADS, LENGTH = 20, 4, 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)  # a key bias has no gradient but rounding
        self.out = nn.Linear(DIM, DIM)
        self.temperature = nn.Parameter(torch.ones(HEADS, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = (q @ k.transpose(-1, -2)) * self.temperature / (DIM // HEADS) ** 0.5
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.attention = Attention()
        self.norm2 = nn.RMSNorm(DIM)
        self.up = nn.Linear(DIM, 33)
        self.down = nn.Linear(33, DIM)
        self.scale = nn.Parameter(torch.full((DIM,), 0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.scale * self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Every kind of parameter: 1-D and 3-D ones, one held by the root, odd sizes, a head that may be tied."""

    def __init__(self, tied: bool = False, layers: int = 2) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(1, LENGTH, DIM) * 0.1)
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList([Layer() for _ in range(layers)])
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        tokens = tokens.to(self.position.device)  # without FSDP2 nobody else does
        x = self.embedding(tokens) + self.position[:, : tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))
