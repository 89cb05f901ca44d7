"""Muon: a torch optimizer over dedicated matrices, with torch's AdamW for everything else, dedicated or not."""

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from ._cut import local_rows
from ._handles import Dedication, all_dedications, is_dedicated, is_elementwise, is_sharded
from ._optimizer_state import MOMENTUM, fill, find_rows, fresh_adamw, pack, params_of, take, unpack

_GROUP_KEYS = (
    "params", "name", "lr", "weight_decay", "momentum", "nesterov", "muon_lr", "muon_weight_decay",
    "adamw_lr", "adamw_betas", "adamw_weight_decay", "adamw_eps",
)  # fmt: skip


_BATCH_ELEMENTS = 1 << 27
"""With replicas, matrices of consecutive groups are stepped together up to this many elements, then published."""


class Muon(torch.optim.Optimizer):
    """Momentum, Newton-Schulz and the update run on each matrix's owner; other ranks have nothing to do for it.

        buf = momentum * buf + grad;   u = newton_schulz(grad + momentum * buf if nesterov else buf)
        weight *= 1 - lr * weight_decay;   weight -= lr * scale(rows, cols) * u

    model: one on which `dedicate_params` was called, once or more (also on submodules).  Its dedicated matrices form
        the `use_muon` groups; every other parameter (elementwise ones, FSDP2's DTensors) goes to AdamW groups, stepped
        by torch.optim.AdamW; elementwise ones on their owners.  Learning-rate schedulers act on all groups.  A
        dedicated parameter that no rank used in a step keeps its weight and state.
    ns_backend: "gram", "gram_accurate" or "standard".  ns_coefficients: "polar_express", "you" or "keller_jordan".
    adjust_lr_fn: "match_rms_adamw" (scale 0.2 sqrt(max(rows, cols))) or "original" (sqrt(max(1, rows / cols))).
    replicate_async: for HSDP: a group's new weights travel to its replicas from the moment they are computed until the
        next use of the group; False waits for all of them at the end of `step`.  Same operations, same bits.
    param_groups: dicts with "params" (parameters of the model) and any of name, lr or muon_lr, weight_decay or
        muon_weight_decay, momentum, nesterov, adamw_lr, adamw_betas, adamw_weight_decay, adamw_eps; what is absent
        comes from the constructor.  Each becomes a Muon group and AdamW groups.  Every trainable parameter must be
        named once.

    Momentum is fp32, in `state[p]["momentum_buffer"]` on the owner, and a meta tensor elsewhere; likewise AdamW's
    "exp_avg" and "exp_avg_sq" of elementwise parameters, whose "step" counts on the owner alone.  `state_dict` and
    `load_state_dict` are collective; torch.distributed.checkpoint's functions call them.
    Raises ValueError, naming the parameter, for a model that is not dedicated, a hyperparameter out of range, an
    unknown key, a parameter that is foreign, named twice or left out, and for a trainable parameter that neither dmuon
    nor FSDP2 manages (its gradient would differ between ranks); naming such a parameter in `param_groups` accepts it.
    """

    def __init__(  # noqa: PLR0913 (the public signature)
        self,
        model: nn.Module,
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        *,
        nesterov: bool = True,
        ns_backend: str = "gram",
        ns_steps: int = 5,
        ns_coefficients: str = "polar_express",
        adjust_lr_fn: str = "match_rms_adamw",
        adamw_lr: float = 1e-3,
        adamw_betas: tuple[float, float] = (0.9, 0.999),
        adamw_weight_decay: float = 0.01,
        adamw_eps: float = 1e-8,
        replicate_async: bool = True,
        param_groups: Iterable[dict[str, Any]] | None = None,
    ) -> None:
        self.dedications = all_dedications(model, "Muon")
        for dedication in self.dedications:
            dedication.runtime.materialize()
        self._defaults = {
            "lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov, "adamw_lr": adamw_lr,
            "adamw_betas": adamw_betas, "adamw_weight_decay": adamw_weight_decay, "adamw_eps": adamw_eps,
        }  # fmt: skip
        self._stepper = torch.classes.dmuon.MuonStepper(ns_backend, ns_steps, ns_coefficients, adjust_lr_fn)
        self._plan = " ".join(dedication.plan_name for dedication in self.dedications)
        self.replicate_async = replicate_async
        self._model = model
        self._names = {p: name for name, p in model.named_parameters()}
        self._reports: list[_FiniteReport] = []
        self._adamw: torch.optim.AdamW | None = None
        self._backwards = self._count_backwards()
        self._unmanaged: list[nn.Parameter] = []
        if param_groups is None:
            self._unmanaged = _check_managed(self._names, self.dedications)
            param_groups = [{"params": list(self._names)}]
        lowered = [lowered for group in param_groups for lowered in self._lower(group)]
        _check_covered(self._names, lowered)
        super().__init__(lowered, {})
        self._complete = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; takes a dict like those of the constructor's `param_groups`."""
        if "use_muon" in param_group:
            super().add_param_group(param_group)
            return
        self._names = {p: name for name, p in self._model.named_parameters()}
        lowered = self._lower(param_group)
        _check_named_once(self._names, self.param_groups + lowered)  # before any of them is added
        for group in lowered:
            super().add_param_group(group)

    def _lower(self, group: dict[str, Any]) -> list[dict[str, Any]]:
        """One user group -> its Muon group and its AdamW groups."""
        if unknown := sorted(set(group) - set(_GROUP_KEYS)):
            raise ValueError(f"[dmuon.Muon] unknown keys {unknown} in param_groups; known: {_GROUP_KEYS}")
        if "params" not in group:
            raise ValueError("[dmuon.Muon] an entry of param_groups has no 'params'")
        values = self._defaults | group
        values["lr"] = group.get("muon_lr", values["lr"])
        values["weight_decay"] = group.get("muon_weight_decay", values["weight_decay"])
        _check_values(values)
        ours = {"format_version": torch.ops.dmuon.checkpoint_version(), "plan": self._plan}
        muon, *rest = _split(group["params"], self._names)
        name = group.get("name", "default")
        keys = ("lr", "momentum", "weight_decay", "nesterov")
        lowered = [{"params": muon, "use_muon": True, "name": f"{name}/muon"} | {k: values[k] for k in keys} | ours]
        adamw = {key: values[f"adamw_{key}"] for key in ("lr", "betas", "weight_decay", "eps")}
        lowered += [{"params": params, "use_muon": False, "name": f"{name}/adamw"} | adamw for params in rest]
        return [entry for entry in lowered if entry["params"]]

    _step_supports_amp_scaling = True  # so that torch.amp.GradScaler calls step, which refuses it

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of everything.  `closure` is evaluated first, with gradients, as in torch.

        Nothing is communicated but HSDP's publishes.
        """
        if hasattr(self, "found_inf"):
            raise RuntimeError(
                "[dmuon.Muon] torch.amp.GradScaler looks at this rank's gradients only, and ranks would disagree about "
                "skipping a step: use dmuon.GradScaler, which has the same methods."
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._report_nonfinite()
        self._check_before_step()
        for dedication in self.dedications:
            dedication.runtime.wait_publishes()
        if groups := self._prepare_adamw():  # before anything is published: a group may have parameters of both kinds
            self._step_adamw(groups)
        for dedication in self.dedications:
            self._step_matrices(dedication)
        return loss

    def _check_before_step(self) -> None:
        for p in self._unmanaged:
            if p.requires_grad:
                raise RuntimeError(
                    f"[dmuon.Muon] parameter {self._names[p]!r} was frozen when the optimizer was built and is trained "
                    "now, but neither dedicated nor sharded by fully_shard: its gradient differs between ranks. Build "
                    "the optimizer with it unfrozen, and dedicate it or fully_shard a module around it."
                )
        backwards = self._count_backwards()
        dedicated = (p for group in self.param_groups for p in group["params"] if is_dedicated(p))
        if backwards == self._backwards and all(p.grad is None for p in dedicated):
            warnings.warn(
                "[dmuon.Muon] step() without a backward since the last one: no matrix has a gradient",
                RuntimeWarning,
                stacklevel=4,
            )
        self._backwards = backwards

    def _count_backwards(self) -> int:
        return sum(dedication.runtime.backward_count() for dedication in self.dedications)

    def _make_adamw(self, groups: list[dict[str, Any]]) -> torch.optim.AdamW:
        """Fused if everything is on GPUs, placeholders aside."""
        devices = {p.device.type for group in groups for p in group["params"] if not p.is_meta}
        fused = devices | {self.dedications[0].unsharded[0].device.type} == {"cuda"}
        return torch.optim.AdamW(groups, fused=fused or None, foreach=None if fused else True)

    def _prepare_adamw(self) -> list[dict[str, Any]]:
        """The groups that are not Muon's, with torch's AdamW, options and state ready for them."""
        groups = [group for group in self.param_groups if not group["use_muon"]]
        if groups and self._adamw is None:
            self._adamw = self._make_adamw(groups)
        for group in groups:  # added since, or loaded
            for key, value in self._adamw.defaults.items():
                group.setdefault(key, value)
        for p in filter(is_elementwise, params_of(groups)):
            if p.requires_grad and not self._state[p]:  # on every rank at the same step: all have the same keys
                self._state[p] = fresh_adamw(p, self._adamw.defaults["fused"])
        return groups

    def _step_adamw(self, groups: list[dict[str, Any]]) -> None:
        with local_rows(params_of(groups)) as local:
            stepped = [p for p in params_of(groups) if p.grad is not None]
            self._adamw.state = defaultdict(dict, {local.get(p, p): self._state[p] for p in stepped})
            self._adamw.param_groups = [g | {"params": [local.get(p, p) for p in g["params"]]} for g in groups]
            self._adamw.step()

    def workspace_bytes(self) -> int | None:
        """Device memory that a step takes at a time for Newton-Schulz of this rank's matrices, before torch's allocator
        rounds up; None where that is not planned (on anything but Hopper GPUs).
        """
        hyper, most = self._muon_groups(), 0
        for dedication in self.dedications:
            device = dedication.unsharded[0].device
            for _, parameters in _batches(dedication):
                for members in _by_group([p for p in parameters if p in hyper and p.requires_grad], hyper):
                    taken = self._stepper.workspace_bytes([tuple(p.shape) for p in members], device)
                    if taken is None:
                        return None
                    most = max(most, taken)
        return most

    def _muon_groups(self) -> dict[nn.Parameter, dict[str, Any]]:
        return {p: group for group in self.param_groups if group["use_muon"] for p in group["params"]}

    def _step_matrices(self, dedication: Dedication) -> None:
        runtime = dedication.runtime
        hyper = self._muon_groups()
        for p in hyper:
            if p.requires_grad:
                self._momentum_of(p)  # as AdamW's state of elementwise parameters
        for indices, parameters in _batches(dedication):
            self._step_batch([p for p in parameters if p in hyper and p.grad is not None], hyper)
            for index in indices:
                runtime.publish(index)
        if not self.replicate_async:
            runtime.wait_publishes()

    def _step_batch(self, parameters: list[nn.Parameter], hyper: dict[nn.Parameter, dict[str, Any]]) -> None:
        for members in _by_group(parameters, hyper):
            group = hyper[members[0]]
            rows = [(self._names[p], p.detach(), p.grad, self._momentum_of(p)) for p in members]
            flags = self._stepper.step(
                rows, (float(group["lr"]), group["momentum"], group["weight_decay"], group["nesterov"])
            )
            self._reports.append(_FiniteReport([row[0] for row in rows], flags))
        if self._reports and not self._reports[-1].on_device:
            self._report_nonfinite()

    def _momentum_of(self, p: nn.Parameter) -> torch.Tensor:
        state = self._state[p]
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(p, memory_format=torch.contiguous_format)
        return state[MOMENTUM]

    @property
    def state(self) -> dict[torch.Tensor, dict[str, Any]]:
        """With what a first step would make already there: torch's checkpoint functions look here for what to load."""
        if self.__dict__.get("_complete"):
            fill(self)
        return self._state

    @state.setter
    def state(self, state: dict[torch.Tensor, dict[str, Any]]) -> None:
        self._state = state

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """As in torch; collective.  State of dedicated parameters is a DTensor with Shard(0), whoever owns them."""
        return pack(self, super().state_dict())

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch; collective, all or nothing.  State of dedicated parameters: DTensors of any sharding, or whole
        tensors on every rank.

        Raises RuntimeError, on every rank before anything changes, for other groups, other shapes, a newer version.
        """
        unpacked = unpack(self, state_dict)
        if unpacked is None:
            return
        groups, state = unpacked
        before = self._state
        super().load_state_dict({"state": {}, "param_groups": groups})
        self._state = self.__dict__.pop("state")  # where torch puts it, past the property
        where, fused = find_rows(self), {p: group.get("fused") for group in self.param_groups for p in group["params"]}
        for p, values in state.items():  # into the memory that is there
            self._state[p] = mine = before.get(p, {})
            if p in where and not is_elementwise(p):
                self._momentum_of(p)
            elif not mine:
                mine.update(fresh_adamw(p, fused[p]))
            take(mine, values, where.get(p))

    def _report_nonfinite(self) -> None:
        """Warns once per step about updates that were NaN or Inf; on a GPU as soon as the step's flags have arrived."""
        while self._reports and self._reports[0].arrived():
            if bad := self._reports.pop(0).bad():
                warnings.warn(
                    f"[dmuon.Muon] NaN or Inf in the update of {', '.join(bad)}", RuntimeWarning, stacklevel=3
                )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Also drops what `no_sync` kept back."""
        super().zero_grad(set_to_none)
        for dedication in self.dedications:
            dedication.runtime.clear_accumulated()


def _batches(dedication: Dedication) -> Iterator[tuple[list[int], list[nn.Parameter]]]:
    """Consecutive communication groups and their owned matrices, in the order of the next forward: the first ones
    can be published while the last ones are still being computed.  All at once when nothing is published.
    """
    most = _BATCH_ELEMENTS if dedication.comms[2] is not None else float("inf")
    indices: list[int] = []
    owned: list[nn.Parameter] = []
    for index, group in enumerate(dedication.groups):
        indices.append(index)
        owned += [param.parameter for param in group.params if param.is_owner]
        if sum(p.numel() for p in owned) >= most:
            yield indices, owned
            indices, owned = [], []
    if indices:
        yield indices, owned


def _by_group(parameters: list[nn.Parameter], hyper: dict[nn.Parameter, dict[str, Any]]) -> list[list[nn.Parameter]]:
    """Those of one parameter group together: one call steps them."""
    members: dict[int, list[nn.Parameter]] = {}
    for p in parameters:
        members.setdefault(id(hyper[p]), []).append(p)
    return list(members.values())


class _FiniteReport:
    """Which matrices of a step had a finite update, on its way to the host without stopping it."""

    def __init__(self, names: list[str], flags: list[torch.Tensor]) -> None:
        self.names = names
        stacked = torch.stack(flags)
        self.on_device = stacked.device.type != "cpu"
        self.event = None
        if self.on_device:
            self.flags = torch.empty(len(flags), dtype=torch.bool, pin_memory=True)
            self.flags.copy_(stacked, non_blocking=True)
            self.event = torch.get_device_module(stacked.device).Event()
            self.event.record()
        else:
            self.flags = stacked

    def arrived(self) -> bool:
        return self.event is None or self.event.query()

    def bad(self) -> list[str]:
        return [name for name, finite in zip(self.names, self.flags.tolist(), strict=True) if not finite]


def _split(params: Any, names: dict[nn.Parameter, str]) -> tuple[list, list, list, list]:
    """Floating ones, frozen ones too (they may be unfrozen): dedicated matrices, elementwise ones, DTensors, plain.

    Torch's foreach kernels do not mix DTensors with others.
    """
    split: tuple[list, list, list, list] = ([], [], [], [])
    for p in [params] if isinstance(params, torch.Tensor) else params:
        if p not in names:
            raise ValueError(
                f"[dmuon.Muon] a parameter of shape {tuple(p.shape)} in param_groups is not one of the model's; take "
                "it from model.named_parameters() after dedicate_params and fully_shard"
            )
        if p.is_floating_point():
            if is_elementwise(p):
                split[1].append(p)
            else:
                split[0 if is_dedicated(p) else 2 if isinstance(p, DTensor) else 3].append(p)
    return split


def _check_values(values: dict[str, Any]) -> None:
    for key in ("lr", "momentum", "weight_decay", "adamw_lr", "adamw_weight_decay", "adamw_eps"):
        if not values[key] >= 0.0:
            raise ValueError(f"[dmuon.Muon] {key} must be >= 0, got {values[key]}")
    if not values["momentum"] < 1.0:
        raise ValueError(f"[dmuon.Muon] momentum must be < 1, got {values['momentum']}")
    if len(values["adamw_betas"]) != 2 or not all(0.0 <= beta < 1.0 for beta in values["adamw_betas"]):
        raise ValueError(f"[dmuon.Muon] adamw_betas must be two numbers in [0, 1), got {values['adamw_betas']}")


def _check_managed(names: dict[nn.Parameter, str], dedications: list[Dedication]) -> list[nn.Parameter]:
    """Somebody averages the gradient of every trainable parameter.  Returns the frozen ones for which nobody would."""
    if any(dedication.world_size == 1 for dedication in dedications):
        return []
    unmanaged = [p for p in names if not is_sharded(p)]
    for p in unmanaged:
        if p.requires_grad:
            raise ValueError(
                f"[dmuon.Muon] trainable parameter {names[p]!r} is neither dedicated nor sharded by fully_shard: its "
                "gradient would differ between ranks. Dedicate it (predicate or elementwise= of dedicate_params), call "
                "fully_shard on a module around it first, freeze it, or, if something else averages its gradient, name "
                "it in param_groups."
            )
    return unmanaged


def _check_named_once(names: dict[nn.Parameter, str], groups: list[dict[str, Any]]) -> set[nn.Parameter]:
    """All parameters of the groups."""
    seen: set[nn.Parameter] = set()
    for p in (p for group in groups for p in group["params"]):
        if p in seen:
            raise ValueError(f"[dmuon.Muon] parameter {names[p]!r} is in param_groups more than once")
        seen.add(p)
    return seen


def _check_covered(names: dict[nn.Parameter, str], groups: list[dict[str, Any]]) -> None:
    seen = _check_named_once(names, groups)
    if left := [name for p, name in names.items() if p.requires_grad and p not in seen]:
        raise ValueError(f"[dmuon.Muon] param_groups leave out trainable parameters: {', '.join(left)}")
