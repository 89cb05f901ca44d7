"""What the checkpoint tests share: a model with every kind of matrix, its training, all its values on every rank."""

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from plain_model import OddModel
from reference import VOCAB, MuonSettings, is_matrix
from setup import Setup, gathered_all
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import dmuon

BATCH = 12
"""Samples of a step, whatever the number of ranks."""


def samples(step: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (BATCH, 6), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1]).float()
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten().to(logits.device))


Named = dict[str, nn.Parameter]


def plain_optimizers(plain: nn.Module) -> tuple[Named, Named, list[torch.optim.Optimizer]]:
    """The trainable matrices and the rest, and torch's own Muon and AdamW over them."""
    trained = {n: p for n, p in plain.named_parameters() if p.requires_grad}
    matrices = {n: p for n, p in trained.items() if is_matrix(n, p)}
    rest = {n: p for n, p in trained.items() if n not in matrices}
    muon = torch.optim.Muon(matrices.items(), lr=0.01, momentum=0.9, weight_decay=0.0)
    return matrices, rest, [muon, torch.optim.AdamW(rest.items(), lr=1e-3)]


def part_of(mesh: DeviceMesh) -> tuple[int, int]:
    """(this rank's place, ranks) in the mesh, rows of a 2-D mesh one after another."""
    coordinate = mesh.get_coordinate()
    place = coordinate[0] if mesh.ndim == 1 else coordinate[0] * mesh.size(1) + coordinate[1]
    return place, mesh.size()


def group_of(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """Of all its ranks; a 2-D mesh has all ranks of the launch."""
    return mesh.get_group() if mesh.ndim == 1 else None


class Run:
    """A dedicated model and its optimizer on a mesh; every rank trains on its own samples of each step."""

    def __init__(self, mesh: DeviceMesh, seed: int = 0, setup: Setup | None = None, **optimizer) -> None:
        self.mesh = mesh
        setup = setup or Setup(make=OddModel)
        torch.manual_seed(seed)
        self.model = setup.make().to(mesh.device_type)
        setup.wrap(self.model, mesh)
        s = MuonSettings()
        values = {"lr": s.lr, "momentum": s.momentum, "weight_decay": s.weight_decay, "adamw_lr": s.adamw_lr}
        self.optimizer = dmuon.Muon(self.model, replicate_async=setup.replicate_async, **(values | optimizer))

    def train(self, steps: Iterator[int] | range) -> "Run":
        place, ranks = part_of(self.mesh)
        for step in steps:
            size = BATCH // ranks
            loss_of(self.model, samples(step)[place * size : (place + 1) * size].to(self.mesh.device_type)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def state(self) -> dict[str, dict]:
        """As a user of torch's functions gets it."""
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
        }

    def save(self, folder: Path) -> "Run":
        """With torch's functions, by the ranks of the run's mesh."""
        dcp.save(self.state(), checkpoint_id=folder, process_group=group_of(self.mesh))
        return self

    def load(self, folder: Path) -> "Run":
        state = self.state()
        dcp.load(state, checkpoint_id=folder, process_group=group_of(self.mesh))
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return self

    def values(self) -> dict[str, torch.Tensor]:
        """Every tensor of model and optimizer, whole, on every rank."""
        return whole(self.state())

    def masters(self) -> dict[str, torch.Tensor]:
        """What this rank owns, read without any state dict: weights and momentum."""
        found = {}
        for param in dmuon.get_dedicated_params(self.model):
            if param.is_owner:
                found[param.name] = param.parameter.detach().clone()
                if "momentum_buffer" in self.optimizer._state[param.parameter]:
                    found[f"{param.name}/momentum"] = self.optimizer._state[param.parameter]["momentum_buffer"].clone()
        return found


def whole(state: dict) -> dict[str, torch.Tensor]:
    """Every tensor of a state dict, whole, under the keys that lead to it."""
    tensors = {name: value for name, value in flat(state).items() if isinstance(value, torch.Tensor)}
    found = gathered_all({name: value for name, value in tensors.items() if isinstance(value, DTensor)})
    return {name: found.get(name, value).detach().clone() for name, value in tensors.items()}


def flat(state: dict | list | tuple, prefix: str = "") -> dict[str, object]:
    """Every value under the keys that lead to it; an option of a parameter group that is a list is one value."""
    items = state.items() if isinstance(state, dict) else enumerate(state)
    found: dict = {}
    for key, value in items:
        nested = isinstance(value, (dict, list, tuple)) and key != "betas" and key != "params"
        found |= flat(value, f"{prefix}{key}/") if nested else {f"{prefix}{key}": value}
    return found


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype, f"{key}: {found[key].dtype}, expected {value.dtype}"
        assert torch.equal(found[key].cpu(), value.cpu()), f"{key}: the bits differ"


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for key, value in expected.items():
        error = (found[key].double() - value.double()).norm() / value.double().norm().clamp_min(1e-12)
        assert error <= tolerance, f"{key}: relative error {error:.2e} > {tolerance:.0e}"
