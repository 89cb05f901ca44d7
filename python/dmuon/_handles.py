"""What users and the package hold of the C++ runtime: a matrix, a group, and a model's dedication."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn

_ATTRIBUTE = "_dmuon"


class DedicatedParam:
    """One dedicated matrix as this rank sees it."""

    def __init__(self, handle: torch.ScriptObject, parameter: nn.Parameter, one_dimensional: bool) -> None:
        self._handle = handle
        self.parameter = parameter
        """The registered parameter: the fp32 master on the owner, a meta tensor of the same shape elsewhere."""
        self.name: str = handle.name()
        self.is_owner: bool = handle.is_owner()
        """Whether this rank holds the master and the optimizer state, and steps the matrix."""
        shard, replicate = handle.owner()
        self.owner_rank: int | tuple[int, int] = shard if one_dimensional else (shard, replicate)
        """The owner's shard coordinate, or (shard, replicate) with a replicate mesh."""

    @property
    def _owned_data(self) -> torch.Tensor | None:
        """The compute-dtype copy this rank sends (the master if the dtypes are equal); None off the owner's column."""
        return self._handle.owned_data()

    @property
    def _reduced_grad(self) -> torch.Tensor | None:
        """The mean gradient after backward, on the owner; None elsewhere, and where no rank used the matrix."""
        return self._handle.reduced_grad()

    def __repr__(self) -> str:
        role = "owner" if self.is_owner else f"owned by {self.owner_rank}"
        return f"DedicatedParam({self.name!r}, {tuple(self.parameter.shape)}, {role})"


class DedicatedParamGroup:
    """The matrices whose communication one hook module triggers."""

    def __init__(self, handle: torch.ScriptObject, params: list[DedicatedParam]) -> None:
        self._handle = handle
        self.name: str = handle.name()
        self.params = params

    @property
    def state(self) -> str:
        """ "sharded", "unsharding" or "unsharded"."""
        return self._handle.state()

    def __repr__(self) -> str:
        return f"DedicatedParamGroup({self.name!r}, {len(self.params)} matrices, {self.state})"


@dataclass
class Site:
    """A place where a module holds a dedicated parameter."""

    module: nn.Module
    attribute: str
    index: int
    """Into the plan's matrices."""


@dataclass
class Dedication:
    """Everything `dedicate_params` made of one model; kept on the model itself."""

    runtime: torch.ScriptObject
    plan: torch.ScriptObject
    comms: tuple[torch.ScriptObject, torch.ScriptObject, torch.ScriptObject | None]
    """Communicators of gathers, of stage 1 of reductions, and of the replicate group."""
    params: list[DedicatedParam]
    groups: list[DedicatedParamGroup]
    unsharded: list[nn.Parameter]
    sites: list[Site] = field(default_factory=list)
    backward: Callable[[], Any] = lambda: None
    """The open backward of the model's hooks, or None."""

    def communicators(self) -> list[torch.ScriptObject]:
        """Those that exist."""
        return [comm for comm in self.comms if comm is not None]

    def replace(self, index: int, parameter: nn.Parameter) -> None:
        """`parameter` takes the place of the registered one (a module's `_apply` made a new object)."""
        param = self.params[index]
        mark_dedicated(parameter, param.owner_rank)
        param.parameter = parameter
        self.runtime.rebind(index, parameter)
        for site in self.sites:
            if site.index == index:
                site.module._parameters[site.attribute] = parameter


def mark_dedicated(parameter: nn.Parameter, owner_rank: int | tuple[int, int]) -> None:
    """The mark by which the FSDP2 patch, and anybody else, knows a dedicated parameter."""
    parameter._dedicated_owner_rank = owner_rank  # type: ignore[attr-defined]


def attach(model: nn.Module, dedication: Dedication) -> None:
    """Keeps the dedication on its root module."""
    object.__setattr__(model, _ATTRIBUTE, dedication)


def find_dedications(model: nn.Module) -> Iterator[Dedication]:
    """Those of the model and of its submodules."""
    for module in model.modules():
        if dedication := module.__dict__.get(_ATTRIBUTE):
            yield dedication


def the_dedication(model: nn.Module, caller: str) -> Dedication:
    """The model's only one; ValueError if there is none or more than one."""
    found = list(find_dedications(model))
    if len(found) != 1:
        raise ValueError(
            f"[dmuon.{caller}] expected a model on which dmuon.dedicate_params was called once, found {len(found)} "
            f"such calls in {type(model).__name__}. Call dedicate_params(model, mesh, predicate) first."
        )
    return found[0]


def get_dedicated_params(model: nn.Module) -> list[DedicatedParam]:
    """All dedicated matrices of the model, in module order; the same list on every rank."""
    return [param for dedication in find_dedications(model) for param in dedication.params]
