"""A Llama-like model for benchmarks: RMSNorm, rotary attention, SwiGLU; random weights, random tokens."""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass(frozen=True)
class LlamaConfig:
    dim: int = 2048
    hidden: int = 5632
    layers: int = 16
    heads: int = 16
    vocab: int = 32000


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(config.dim, config.dim, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = (w(x).view(b, t, self.heads, -1).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(rotate(q, rope), rotate(k, rope), v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(b, t, d))


class Layer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim)
        self.gate = nn.Linear(config.dim, config.hidden, bias=False)
        self.up = nn.Linear(config.dim, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rope)
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList([Layer(config) for _ in range(config.layers)])
        self.norm = nn.RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rope = rotary(tokens.shape[1], self.config.dim // self.config.heads, tokens.device)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, rope)
        return self.head(self.norm(x))


def rotary(length: int, dim: int, device: torch.device) -> torch.Tensor:
    """cos and sin, [2, length, dim / 2]."""
    frequency = 10000.0 ** (-torch.arange(0, dim, 2, device=device) / dim)
    angle = torch.outer(torch.arange(length, device=device), frequency)
    return torch.stack([angle.cos(), angle.sin()])


def rotate(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    cos, sin = rope.to(x.dtype)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)
