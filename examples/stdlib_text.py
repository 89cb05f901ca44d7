"""Real text that every machine has: the sources of Python's own standard library, as bytes."""

import hashlib
import sysconfig
from pathlib import Path

import torch

_NOT_TEXT_OF_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_HELD_OUT_ONE_IN = 20

Batch = tuple[torch.Tensor, torch.Tensor]
"""Bytes and, for each, the byte that follows: int64 [batch, seq] each."""


def _sources() -> list[tuple[str, Path]]:
    """(path inside the library, file), in an order that does not depend on the file system."""
    root = Path(sysconfig.get_path("stdlib"))
    found = ((path.relative_to(root), path) for path in root.rglob("*.py"))
    return sorted((name.as_posix(), path) for name, path in found if not _NOT_TEXT_OF_THE_LIBRARY & set(name.parts))


def _held_out(name: str) -> bool:
    """By a hash of the file's name: about one file in twenty, the same ones on every machine."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]) % _HELD_OUT_ONE_IN == 0


def load_text() -> tuple[torch.Tensor, torch.Tensor]:
    """Training and held-out text, each uint8 [bytes].  No file is in both."""
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for name, path in _sources():
        parts[_held_out(name)].append(path.read_bytes())
    train, held_out = (torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8) for part in parts)
    return train, held_out


def _windows(text: torch.Tensor, starts: torch.Tensor, seq: int, device: torch.device) -> Batch:
    """The windows of `text` at `starts` [batch]."""
    rows = torch.stack([text[start : start + seq + 1] for start in starts.tolist()]).to(device, torch.long)
    return rows[:, :-1], rows[:, 1:]


class Batches:
    """This rank's training batches: random windows that depend on (seed, step, rank) alone: the same in all runs."""

    def __init__(self, text: torch.Tensor, seq: int, batch: int, rank: int, seed: int, device: torch.device) -> None:
        self.text, self.seq, self.batch = text, seq, batch
        self.rank, self.seed, self.device = rank, seed, device

    def __getitem__(self, step: int) -> Batch:
        generator = torch.Generator().manual_seed((self.seed << 40) + (step << 16) + self.rank)
        starts = torch.randint(len(self.text) - self.seq, (self.batch,), generator=generator)
        return _windows(self.text, starts, self.seq, self.device)


def validation_batches(
    text: torch.Tensor, seq: int, batch: int, place: tuple[int, int], size: int, device: torch.device
) -> list[Batch]:
    """A (rank, ranks) share of windows spread evenly over the held-out text: about `size` bytes over all ranks."""
    rank, ranks = place
    count = max(1, round(size / (seq * batch * ranks))) * batch * ranks
    starts = torch.linspace(0, len(text) - seq - 1, count).long()[rank::ranks]
    return [_windows(text, chunk, seq, device) for chunk in starts.split(batch)]
