"""What users and the package hold of the C++ runtime: a parameter, a group, and a model's dedication."""

import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

_ATTRIBUTE = "_dmuon"


class DedicatedParam:
    """One dedicated matrix, or elementwise parameter, as this rank sees it."""

    leads = True
    """Of one that is cut by rows, whether this rank has its first ones."""
    intact = True
    """False if somebody else replaced what is inside."""

    def __init__(
        self,
        handle: torch.ScriptObject,
        index: int,
        parameter: nn.Parameter,
        one_dimensional: bool,
        elementwise: bool = False,
    ) -> None:
        self._handle = handle
        self.index = index
        """Into the plan; of one that is cut by rows, of this rank's part."""
        self.elementwise = elementwise
        """Whether AdamW steps it, not Muon."""
        self.parameter = parameter
        """The registered parameter: the fp32 master on the owner, a meta tensor of the same shape elsewhere.  A DTensor
        with Shard(0) where every rank owns its rows."""
        self.name: str = handle.name()
        self.is_owner: bool = handle.is_owner()
        """Whether this rank holds the master (or some rows of it) and the optimizer state, and steps them."""
        shard, replicate = handle.owner()
        self.owner_rank: int | tuple[int, int] | None = shard if one_dimensional else (shard, replicate)
        """The owner's shard coordinate, or (shard, replicate) with replicas; None where every rank owns rows."""

    @property
    def _owned_data(self) -> torch.Tensor | None:
        """The compute-dtype copy this rank sends (the master if the dtypes are equal); None off the owner's column."""
        return self._handle.owned_data()

    @property
    def _reduced_grad(self) -> torch.Tensor | None:
        """The mean gradient after backward, on the owner; None elsewhere, and where no rank used the matrix."""
        return self._handle.reduced_grad()

    def bind(self, runtime: torch.ScriptObject, parameter: nn.Parameter) -> None:
        """`parameter` is the registered one from now on."""
        self.parameter = parameter
        runtime.rebind(self.index, parameter)

    def __repr__(self) -> str:
        role = "cut by rows" if self.owner_rank is None else "owner" if self.is_owner else f"owned by {self.owner_rank}"
        return f"DedicatedParam({self.name!r}, {tuple(self.parameter.shape)}, {role})"


class DedicatedParamGroup:
    """The matrices and elementwise parameters whose communication one hook module triggers."""

    def __init__(self, handle: torch.ScriptObject, params: list[DedicatedParam]) -> None:
        self._handle = handle
        self.name: str = handle.name()
        self.params = params

    @property
    def state(self) -> str:
        """ "sharded", "unsharding" or "unsharded"."""
        return self._handle.state()

    def __repr__(self) -> str:
        return f"DedicatedParamGroup({self.name!r}, {len(self.params)} parameters, {self.state})"


class Site:
    """A place where a module holds a dedicated parameter.  Does not keep the module alive."""

    def __init__(self, module: nn.Module, attribute: str) -> None:
        self._module = weakref.ref(module)
        self.attribute = attribute
        self.index = -1
        """Into the dedication's parameters."""

    @property
    def module(self) -> nn.Module:
        module = self._module()
        assert module is not None
        return module


@dataclass(eq=False)
class Dedication:
    """Everything `dedicate_params` made of one model; kept on the model itself."""

    runtime: torch.ScriptObject
    plan: torch.ScriptObject
    comms: tuple[torch.ScriptObject, torch.ScriptObject, torch.ScriptObject | None]
    """Communicators of gathers, of stage 1 of reductions, and of the replicate group."""
    axes: list[dist.ProcessGroup]
    """The shard group and, with a replicate mesh, the replicate group: for sums over all ranks of the model."""
    params: list[DedicatedParam]
    groups: list[DedicatedParamGroup]
    unsharded: list[nn.Parameter]
    sites: list[Site] = field(default_factory=list)
    rows: Any = None
    """Into and out of state dicts (`_checkpoint.Rows`)."""
    backward: Callable[[], Any] = lambda: None
    """The open backward of the model's hooks, or None."""
    root_hooks: Callable[[], Any] = lambda: None
    """Those of the model while it exists, or None."""

    @property
    def plan_name(self) -> str:
        """The plan's fingerprint, in 16 hexadecimal digits."""
        return f"{self.plan.fingerprint() & (1 << 64) - 1:016x}"

    def communicators(self) -> list[torch.ScriptObject]:
        """Those that exist."""
        return [comm for comm in self.comms if comm is not None]

    @property
    def world_size(self) -> int:
        """Ranks that train this model."""
        return math.prod(axis.size() for axis in self.axes)

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank of them."""
        return all(axis.rank() == 0 for axis in self.axes)

    def all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """In place, over all ranks that train this model.  On their device, without stopping the host."""
        for axis in self.axes:
            if axis.size() > 1:
                dist.all_reduce(tensor, op, group=axis)

    def end_cut_off(self) -> None:
        """Ends a forward that KeyboardInterrupt, say, has cut off."""
        if hooks := self.root_hooks():
            hooks.end_cut_off()

    def publish(self, having: set[int] | None = None) -> None:
        """Sends masters (of groups that have a matrix of `having`) to their replicas and waits; collective."""
        for index, group in enumerate(self.groups):
            if having is None or any(self.params[i] in group.params for i in having):
                self.runtime.publish(index)
        self.runtime.wait_publishes()

    def replace(self, index: int, parameter: nn.Parameter) -> None:
        """`parameter` takes the place of the registered one (a module's `_apply` made a new object)."""
        self.params[index].bind(self.runtime, parameter)
        mark_dedicated(self.params[index])
        for site in self.sites:
            if site.index == index:
                site.module._parameters[site.attribute] = parameter


def mark_dedicated(param: DedicatedParam) -> None:
    """The mark by which the FSDP2 patch, and anybody else, knows a dedicated parameter."""
    param.parameter._dedicated_owner_rank = param.owner_rank  # type: ignore[attr-defined]
    param.parameter._dedicated_elementwise = param.elementwise  # type: ignore[attr-defined]


def is_dedicated(tensor: torch.Tensor) -> bool:
    """Whether it is a dedicated parameter of any model."""
    return hasattr(tensor, "_dedicated_owner_rank")


def is_elementwise(tensor: torch.Tensor) -> bool:
    """Whether it is a dedicated parameter that AdamW steps."""
    return getattr(tensor, "_dedicated_elementwise", False)


def is_cut(tensor: torch.Tensor) -> bool:
    """Whether it is one of those that are cut by rows."""
    return is_elementwise(tensor) and isinstance(tensor, DTensor)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether its values differ between ranks by design: dedicated, or a DTensor."""
    return is_dedicated(tensor) or isinstance(tensor, DTensor)


_live: "weakref.WeakSet[Dedication]" = weakref.WeakSet()


def live_dedications() -> list[Dedication]:
    """Of all models that exist in this process."""
    return list(_live)


def attach(model: nn.Module, dedication: Dedication) -> None:
    """Keeps the dedication on its root module."""
    _live.add(dedication)
    object.__setattr__(model, _ATTRIBUTE, dedication)


def find_dedications(model: nn.Module) -> Iterator[Dedication]:
    """Those of the model and of its submodules."""
    for module in model.modules():
        if dedication := module.__dict__.get(_ATTRIBUTE):
            yield dedication


def end_cut_off(model: nn.Module) -> None:
    """`Dedication.end_cut_off` for all of them: what reads `named_parameters` must see the registered ones."""
    for dedication in find_dedications(model):
        dedication.end_cut_off()


def all_dedications(model: nn.Module, caller: str) -> list[Dedication]:
    """At least one; ValueError if there is none."""
    found = list(find_dedications(model))
    if not found:
        raise ValueError(
            f"[dmuon.{caller}] expected a model on which dmuon.dedicate_params was called, found no such call in "
            f"{type(model).__name__}. Call dedicate_params(model, mesh, predicate) first."
        )
    return found


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
    """All dedicated matrices and elementwise parameters of the model, in module order; the same list on every rank."""
    return [param for dedication in find_dedications(model) for param in dedication.params]
