"""A small byte-level GPT in plain torch: nothing in it knows about sharding or owners."""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

BYTES = 256


@dataclass(frozen=True)
class GPTConfig:
    layers: int
    dim: int
    seq: int
    head_dim: int = 32

    def __post_init__(self) -> None:
        if self.dim % self.head_dim:
            raise ValueError(f"dim must be a multiple of {self.head_dim}, got {self.dim}")


def rotary_turns(seq: int, head_dim: int) -> torch.Tensor:
    """Rotary position embedding: cosines and sines, [2, seq, head_dim / 2]."""
    frequencies = 10000.0 ** -torch.linspace(0, 1, head_dim // 2)
    angles = torch.outer(torch.arange(seq).float(), frequencies)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """x: [batch, heads, seq, head_dim], whose halves are the two coordinates of what is turned."""
    cos, sin = turns[:, : x.shape[-2]]
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q = nn.Linear(config.dim, config.dim, bias=False)
        self.k = nn.Linear(config.dim, config.dim, bias=False)
        self.v = nn.Linear(config.dim, config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        """x: [batch, seq, dim]; turns: see `rotary_turns`."""
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for proj in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(rotate(q, turns), rotate(k, turns), v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.dim, 4 * config.dim, bias=False)
        self.down = nn.Linear(4 * config.dim, config.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Layer(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), turns)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, config.dim)
        self.register_buffer("turns", rotary_turns(config.seq, config.head_dim), persistent=False)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, BYTES, bias=False)
        self._init_weights(config)

    def _init_weights(self, config: GPTConfig) -> None:
        """Normal, by the width of the input; smaller by sqrt(2 layers) for what is added to the residual stream."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
                std = (parameter.shape[1] * (2 * config.layers if residual else 1)) ** -0.5
                nn.init.normal_(parameter, std=std)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """tokens, targets: int64 [batch, seq].  Returns the mean cross entropy in nats per byte."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.turns)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
