"""Checkpoint directories that are whole or not there, and what else torch has no function for."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint import state_dict as torch_state
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only

from ._checkpoint import mode
from ._handles import Dedication, all_dedications, end_cut_off, is_dedicated, is_elementwise
from ._muon import Muon
from ._optimizer_state import ADAMW, MOMENTUM, filled, params_of


def get_state_dict(model: nn.Module, optimizer: Muon | None = None, *, cpu_offload: bool = True) -> dict[str, Any]:
    """{"model": ..., "optimizer": ...} from torch's get_model_state_dict and get_optimizer_state_dict; collective.

    cpu_offload: a snapshot in host memory, for which the device needs memory for one matrix.  False: as torch's own
    functions, with rows of all matrices on the device.
    """
    end_cut_off(model)
    with mode("host") if cpu_offload else nullcontext():
        state: dict[str, Any] = {"model": torch_state.get_model_state_dict(model)}
        if optimizer is not None:
            state["optimizer"] = torch_state.get_optimizer_state_dict(model, optimizer)
            # For DCP a tuple is one value: one small file entry, not one an option.
            state["optimizer"]["param_groups"] = tuple(state["optimizer"]["param_groups"])
    if cpu_offload:  # rows are copies already
        keep = lambda t: t if hasattr(t, "_dmuon_rows") else t.detach().to("cpu", copy=True)  # noqa: E731
        state = tree_map_only(torch.Tensor, keep, state)
    return state


def set_state_dict(model: nn.Module, optimizer: Muon | None, state: Mapping[str, Any], *, strict: bool = True) -> None:
    """Takes what `get_state_dict` gave, on any mesh and with any grouping of parameters; collective.  All or nothing:
    model and optimizer are both checked on all ranks before either changes.  Raises RuntimeError on every rank.
    """
    end_cut_off(model)
    options = torch_state.StateDictOptions(strict=strict)
    taken = None if optimizer is None else _regrouped(model, optimizer, state["optimizer"], strict)
    for pass_mode in ("check", ""):
        with mode(pass_mode):
            torch_state.set_model_state_dict(model, dict(state["model"]), options=options)
            if optimizer is not None:
                optimizer.load_state_dict(taken)


def _shapes(model: nn.Module, optimizer: Muon) -> dict[str, Any]:
    """torch's state dict of the optimizer without values."""
    with mode("shapes"):
        return torch_state.get_optimizer_state_dict(model, optimizer)


def _regrouped(model: nn.Module, optimizer: Muon, saved: Mapping[str, Any], strict: bool) -> dict[str, Any]:
    """`saved` in the optimizer's own groups; options that it lacks are as they are now."""
    mine = _shapes(model, optimizer)
    if strict and (missing := sorted(mine["state"].keys() - saved["state"].keys())):
        raise RuntimeError(f"[dmuon.set_state_dict] nothing was changed: no optimizer state for {', '.join(missing)}")
    of = {name: group for group in saved["param_groups"] for name in group["params"]}
    groups = [each | of.get(each["params"][0], {}) | {"params": each["params"]} for each in mine["param_groups"]]
    return {"state": saved["state"], "param_groups": groups}


def save_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizer: Muon | None = None,
    *,
    extra: dict[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a DCP checkpoint to the directory `path`, on a file system that all ranks share; collective.

    It appears in one step when every rank's part is on disk; a run that is killed leaves what was there.  extra: what
    else torch can save, the same on all ranks (a scheduler's state dict).  overwrite: replaces a checkpoint that is
    there; otherwise that is an error.  Raises RuntimeError on every rank if any rank fails.
    """
    dedications = all_dedications(model, "save_checkpoint")
    first, group = dedications[0], _group_of(dedications[0])
    partial = Path(path).absolute().with_name(f".{Path(path).absolute().name}.partial")
    begin = torch.classes.dmuon.Checkpoint.begin_directory
    _together(first, "save_checkpoint", lambda: first.is_first and begin(str(path), overwrite))
    state = get_state_dict(model, optimizer) | ({"extra": extra} if extra else {})
    _together(first, "save_checkpoint", lambda: dcp.save(state, checkpoint_id=partial, process_group=group))
    plans = " ".join(dedication.plan_name for dedication in dedications)
    first.rows.native.commit(str(path), f"__{dist.get_rank(group)}_", plans)


def load_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizer: Muon | None = None,
    *,
    extra: dict[str, Any] | None = None,
    strict: bool = True,
) -> dict[str, Any]:
    """Loads what `save_checkpoint` wrote, on any mesh; collective.  Returns `extra`, with the saved values.

    All or nothing: everything is read into host memory and checked on all ranks before anything changes.  extra: what
    to load, in the saved structure.  strict=False: weights that the checkpoint lacks stay, state begins afresh.
    Raises RuntimeError on every rank, naming the file or key, for a checkpoint that is incomplete, truncated, damaged,
    of a newer format version, or of other keys or shapes.
    """
    end_cut_off(model)
    first = all_dedications(model, "load_checkpoint")[0]
    group, reader = _group_of(first), dcp.FileSystemReader(path)
    saved: dict[str, tuple] = {}  # where each saved value is in the state
    check, part = torch.classes.dmuon.Checkpoint.check_directory, (dist.get_rank(group), dist.get_world_size(group))
    _together(first, "load_checkpoint", lambda: check(str(path), *part))
    _together(first, "load_checkpoint", lambda: saved.update(reader.read_metadata().planner_data))
    state = _room_for(saved, model, optimizer) | ({"extra": extra} if extra else {})

    def read() -> None:
        if strict and (more := sorted({p[1] for p in saved.values() if p[0] == "model"} - state["model"].keys())):
            raise RuntimeError(f"unexpected keys, which the model lacks: {', '.join(more)}")
        of_optimizer = state.get("optimizer", {}).get("state", {}).items()
        tables = [("model", state["model"]), *((f"optimizer.state.{name}", values) for name, values in of_optimizer)]
        for prefix, table in [] if strict else tables:
            for key in [key for key in table if f"{prefix}.{key}" not in saved]:
                del table[key]
        planner = dcp.DefaultLoadPlanner(allow_partial_load=not strict)
        dcp.load(state, storage_reader=reader, planner=planner, process_group=group)

    _together(first, "load_checkpoint", read)
    set_state_dict(model, optimizer, state, strict=strict)
    return state.get("extra", {})


def _room_for(saved: Mapping[str, tuple], model: nn.Module, optimizer: Muon | None) -> dict[str, Any]:
    """A state dict of host memory to read into; with the state of those frozen parameters for which there is some."""
    frozen: list[torch.Tensor] = []
    if optimizer is not None:
        names = {where[2] for where in saved.values() if where[:2] == ("optimizer", "state")}
        pairs = zip(
            params_of(_shapes(model, optimizer)["param_groups"]), params_of(optimizer.param_groups), strict=True
        )
        frozen = [p for name, p in pairs if name in names and not p.requires_grad]
    with mode("empty"), filled(optimizer, frozen) if frozen else nullcontext():
        state = get_state_dict(model, optimizer, cpu_offload=False)
    return tree_map_only(torch.Tensor, lambda t: torch.empty_like(t, device="cpu"), state)


def _together(dedication: Dedication, caller: str, act: Callable[[], Any]) -> None:
    """Every rank acts; if that fails on any rank, all raise RuntimeError."""
    problem = ""
    try:
        act()
    except CheckpointException as error:  # no Exception, and a long text
        problem = "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items())
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    dedication.rows.begin(caller, problem)


def _group_of(dedication: Dedication) -> dist.ProcessGroup | None:
    """The ranks that take part, for DCP: the model's axis if it has but one, or else all."""
    if len(dedication.axes) > 1 and dedication.world_size != dist.get_world_size():
        raise ValueError("[dmuon] replicas on a part of the ranks: use get_state_dict and torch.distributed.checkpoint")
    return dedication.axes[0] if len(dedication.axes) == 1 else None


def import_state(
    model: nn.Module, optimizer: Muon | None, model_state: Mapping[str, Any], *optimizer_states: Mapping[str, Any]
) -> dict[str, list[str]]:
    """Begins from another optimizer's checkpoint, given as whole tensors on every rank, as torch.load or
    torch.distributed.checkpoint.format_utils.dcp_to_torch_save give them; collective, all or nothing.

    optimizer_states: of torch.optim.Muon, AdamW or dmuon.Muon, with parameter names (from get_optimizer_state_dict, or
    of an optimizer that was built from named_parameters()).  Matrices take momentum (torch.optim.Muon's is a mean,
    dmuon's a sum: it is scaled), other parameters AdamW's state.  Options stay those of `optimizer`.
    Returns names: "weights" that were taken, "state" that was, parameters with "fresh" state, entries "ignored".
    """
    end_cut_off(model)
    found = _by_name(optimizer_states)
    report: dict[str, list[str]] = {"weights": list(model_state), "state": [], "fresh": []}
    state: dict[str, Any] = {}
    if optimizer is not None:
        with mode("shapes"):
            state = optimizer.state_dict() | {"state": {}}
        for key, p in enumerate(params_of(optimizer.param_groups)):
            name, fields = optimizer._names[p], (MOMENTUM,) if is_dedicated(p) and not is_elementwise(p) else ADAMW
            taken = all((name, field) in found for field in fields)
            report["state" if taken else "fresh"].append(name)
            if taken:
                state["state"][key] = {field: _cut_like(p, found.pop((name, field))) for field in fields}
    for pass_mode in ("check", ""):
        with mode(pass_mode):
            options = torch_state.StateDictOptions(full_state_dict=True)
            torch_state.set_model_state_dict(model, dict(model_state), options=options)
            if optimizer is not None:
                optimizer.load_state_dict(state)
    return report | {"ignored": [f"{name}.{field}" for name, field in found]}


def _by_name(states: tuple[Mapping[str, Any], ...]) -> dict[tuple[str, str], torch.Tensor]:
    """Each value of the optimizer states by (parameter name, field); torch.optim.Muon's momentum as a sum."""
    found: dict[tuple[str, str], torch.Tensor] = {}
    for values_of, group in [(state["state"], group) for state in states for group in state["param_groups"]]:
        names = group.get("param_names", group["params"])
        if not all(isinstance(name, str) for name in names):
            raise ValueError(
                "[dmuon.import_state] an optimizer state has no parameter names. Take it with "
                "get_optimizer_state_dict, or build that optimizer from model.named_parameters()"
            )
        for name, key in zip(names, group["params"], strict=True):
            values = dict(values_of.get(key, {}))
            if MOMENTUM in values and "ns_coefficients" in group:
                values[MOMENTUM] = values[MOMENTUM].float() / (1.0 - group["momentum"])
            found |= {(name, field): value for field, value in values.items()}
    return found


def _cut_like(p: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    if not isinstance(p, DTensor) or whole.ndim == 0:
        return whole
    return distribute_tensor(whole.to(p.device), p.device_mesh, p.placements, src_data_rank=None)


def export_safetensors(path: str | Path, model: nn.Module, *, dtype: torch.dtype | None = None) -> None:
    """Writes all weights and buffers, under the model's own names, to a safetensors file on the first rank; collective.

    dtype: of floating tensors in the file; default: their own (fp32 for dedicated matrices).  One whole tensor at a
    time is on the device and on the first rank's host.
    """
    first = all_dedications(model, "export_safetensors")[0]
    state, rows, writers = get_state_dict(model)["model"], [], []
    for key, value in state.items():
        rows.append((key, dtype if dtype and value.is_floating_point() else value.dtype, list(value.shape)))
    make = torch.classes.dmuon.SafetensorsWriter
    _together(first, "export_safetensors", lambda: first.is_first and writers.append(make(str(path), rows)))
    for value in state.values():
        whole = value.to(value.device_mesh.device_type).full_tensor() if isinstance(value, DTensor) else value
        for writer in writers:
            writer.write(whole)
    _together(first, "export_safetensors", lambda: [writer.close() for writer in writers])
