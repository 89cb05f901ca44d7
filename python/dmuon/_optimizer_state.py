"""State dicts of `Muon`: what an owner keeps for a parameter appears as row-sharded DTensors, like the parameter."""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ._checkpoint import MODE, Rows, entries
from ._handles import Dedication, is_cut, is_elementwise

MOMENTUM = "momentum_buffer"
ADAMW = ("step", "exp_avg", "exp_avg_sq")
_OF_THIS_RUN = (
    "foreach", "maximize", "capturable", "differentiable", "fused", "amsgrad", "decoupled_weight_decay",
    "format_version", "plan",
)  # fmt: skip
"""Options that say how this run computes, not what it has learned: loading leaves them as they are."""


def find_rows(optimizer: Any) -> dict[torch.Tensor, tuple[Rows, int]]:
    """Where each dedicated parameter of the optimizer travels."""
    found = {
        param.parameter: (dedication.rows, index)
        for dedication in optimizer.dedications
        for index, param in enumerate(dedication.params)
    }
    return {p: found[p] for p in params_of(optimizer.param_groups) if p in found}


def fill(optimizer: Any, frozen: Collection[torch.Tensor] = ()) -> None:
    """Every trained parameter, and these frozen ones, have the state that a first step would give them.  Changes no
    result.
    """
    optimizer._prepare_adamw()
    for group in optimizer.param_groups:
        for p in (p for p in group["params"] if p.requires_grad or p in frozen):
            if group["use_muon"]:
                optimizer._momentum_of(p)
            elif not optimizer._state[p]:
                optimizer._state[p] = fresh_adamw(p, group["fused"])


@contextmanager
def filled(optimizer: Any, frozen: Iterable[torch.Tensor]) -> Iterator[None]:
    """Inside, these frozen parameters have state, as trained ones do: a checkpoint may hold some for them."""
    added = {p for p in frozen if not optimizer._state.get(p)}
    try:
        fill(optimizer, added)
        yield
    finally:
        for p in added:
            optimizer._state.pop(p, None)


def fresh_adamw(p: torch.Tensor, fused: bool | None) -> dict[str, torch.Tensor]:
    """Of an elementwise parameter the moments are placeholders where the parameter is one, and of its rows if cut."""
    wide = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
    step = torch.zeros((), device=p.device) if fused and not p.is_meta else torch.zeros((), dtype=wide)
    like = p._local_tensor if is_cut(p) else p
    return {"step": step} | {key: torch.zeros_like(like) for key in ADAMW[1:]}


def fields_of(p: torch.Tensor) -> tuple[str, ...]:
    """What travels of the state of a dedicated parameter."""
    return ADAMW[1:] if is_elementwise(p) else (MOMENTUM,)


def take(mine: dict[str, torch.Tensor], values: dict[str, Any], where: tuple[Rows, int] | None) -> None:
    """`mine`, a parameter's state, takes the values of a state dict; collective for a dedicated one (`where`)."""
    for key in sorted(values):
        if where is not None and key != "step":
            rows, index = where
            rows.load(index, values[key], mine[key])
        else:
            put(mine[key], values[key])


def put(mine: torch.Tensor, value: Any) -> None:
    """Copies a value of the same sharding, from any device."""
    to, source = (t.to_local() if isinstance(t, DTensor) else t for t in (mine, torch.as_tensor(value)))
    to.copy_(source)


def params_of(groups: list[dict[str, Any]]) -> list[Any]:
    """Parameters, or what stands for them in a state dict, in the order of a state dict."""
    return list(chain.from_iterable(group["params"] for group in groups))


def pack(optimizer: Any, packed: dict[str, Any]) -> dict[str, Any]:
    """torch's state dict of the optimizer with momentum replaced by rows; collective."""
    where = find_rows(optimizer)
    for dedication in optimizer.dedications:
        dedication.rows.begin("Muon.state_dict")
    steps = _steps(optimizer, where)
    for key, p in enumerate(params_of(optimizer.param_groups)):
        if p in where and (values := packed["state"].pop(key, {})):
            rows, index = where[p]
            saved = {"step": steps[p]} if p in steps else {}
            packed["state"][key] = saved | {field: rows.save(index, values[field]) for field in fields_of(p)}
    return packed


def _steps(optimizer: Any, where: dict[torch.Tensor, tuple[Rows, int]]) -> dict[torch.Tensor, torch.Tensor]:
    """AdamW's step counts of elementwise parameters, which their owners know, on every rank; collective."""
    steps = {p: optimizer._state[p]["step"] for p in filter(is_elementwise, where) if optimizer._state.get(p)}
    if MODE.get() in ("shapes", "empty"):
        return steps
    for dedication in optimizer.dedications:
        mine = [p for p in steps if where[p][0] is dedication.rows]
        fused = bool(optimizer._adamw.defaults["fused"]) if mine else False
        steps |= zip(mine, _owners_values(dedication, [(p, steps[p]) for p in mine], fused), strict=True)
    return steps


def _owners_values(
    dedication: Dedication, pairs: list[tuple[torch.Tensor, torch.Tensor]], on_device: bool
) -> list[torch.Tensor]:
    """Of (parameter, 0-d tensor that its owner has right): that tensor on every rank; collective unless empty."""
    if not pairs:
        return []
    first = {id(param.parameter): param.is_owner and param.leads for param in dedication.params}
    owned = [i for i, (p, _) in enumerate(pairs) if first[id(p)]]
    sums = torch.zeros(len(pairs))
    if owned:
        sums[owned] = torch.stack([pairs[i][1] for i in owned]).to(sums)
    sums = sums.to(dedication.unsharded[0].device)
    dedication.all_reduce(sums, torch.distributed.ReduceOp.SUM)
    return [value.clone() for value in (sums if on_device else sums.cpu())]


def unpack(optimizer: Any, given: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[torch.Tensor, dict]] | None:
    """Checks a state dict on all ranks; then the groups with their options, and the given state by parameter.  None in
    mode "check".  Raises RuntimeError on every rank, before anything is changed.
    """
    optimizer._prepare_adamw()
    groups, saved, where = optimizer.param_groups, given["param_groups"], find_rows(optimizer)
    problem = torch.classes.dmuon.Checkpoint.groups_problem(_groups(groups), _groups(saved))
    state = {} if problem else _match(given["state"], groups, saved)
    expected, found = _compared(optimizer, state, where)
    for dedication in optimizer.dedications:
        dedication.rows.begin("Muon.load_state_dict", problem, entries(expected), entries(found))
    if MODE.get() == "check":
        return None
    merged = [mine | theirs | _of_this_run(mine) for mine, theirs in zip(groups, saved, strict=True)]
    return merged, state


def _match(given: dict[Any, dict[str, Any]], groups: list[dict[str, Any]], saved: list[dict[str, Any]]) -> dict:
    """The given state by parameter; torch leaves {} where a flattened state lacks a value."""
    pairs = zip(params_of(groups), params_of(saved), strict=True)
    state = {p: {k: v for k, v in (given.get(key) or {}).items() if v != {}} for p, key in pairs}
    return {p: values for p, values in state.items() if values}


def _compared(optimizer: Any, state: dict, where: dict) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the given state must look like, and what it does; by readable name."""
    expected, found = {}, {}
    for p, values in state.items():
        name, like, fields = optimizer._names[p], p, ADAMW[1:]
        if p in where:
            like, fields = p.to("meta"), fields_of(p)
        expected |= {f"{name}.{key}": like for key in fields}
        found |= {f"{name}.{key}": value for key, value in values.items() if key != "step"}
    return expected, found


def _of_this_run(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key in _OF_THIS_RUN}


def _groups(groups: list[dict[str, Any]]) -> list[tuple[bool, int, int]]:
    return [(g.get("use_muon", False), len(g["params"]), g.get("format_version", 1)) for g in groups]
