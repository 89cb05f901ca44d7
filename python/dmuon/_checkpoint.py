"""State dicts of a dedicated model: what it owns whole appears as row-sharded DTensors, as FSDP2's parameters do."""

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ._cut import CutParam, common_mesh
from ._handles import Dedication, Site, find_dedications, is_dedicated
from ._report import publish

Entries = Sequence[tuple[str, list[int], str]]
MODE: ContextVar[str] = ContextVar("dmuon_checkpoint", default="")


@contextlib.contextmanager
def mode(name: str) -> Iterator[None]:
    """What `state_dict` and `load_state_dict` of models and optimizers do inside.

    "host": rows go to host memory, one matrix at a time.  "empty": nothing is sent, host memory without values.
    "shapes": likewise on the meta device.  "check": loading checks and changes nothing.  "load": it has checked.
    """
    token = MODE.set(name)
    try:
        yield
    finally:
        MODE.reset(token)


class Rows:
    """The parameters of one dedication on their way into and out of state dicts.  All methods are collective."""

    def __init__(self, dedication: Dedication, mesh: DeviceMesh, replicate_mesh: DeviceMesh | None) -> None:
        gather, _, replicate = dedication.comms
        self.native = torch.classes.dmuon.Checkpoint(dedication.runtime, gather, replicate)
        self.params = dedication.params
        # Without a common mesh every replica describes the same rows, and DCP writes them once all the same.
        self.mesh = (common_mesh(mesh, replicate_mesh) if replicate_mesh else None) or mesh
        self.placements = (*[Replicate()] * (self.mesh.ndim - 1), Shard(0))
        self.saved: dict[int, DTensor] | None = None
        """While the root's state dict is made: the weights that are in it, so that tied ones are one tensor."""

    def save(self, index: int, owned: torch.Tensor) -> DTensor:
        """This rank's rows of `owned` (the matrix's weight or state; real on the owner, ignored elsewhere)."""
        param = self.params[index]
        if isinstance(param, CutParam):
            device = {"shapes": "meta", "empty": "cpu"}.get(MODE.get())
            rows = param.wrap(owned)
            return rows.detach() if device is None else torch.empty_like(rows, device=device)
        if MODE.get() in ("shapes", "empty"):
            local = self.native.empty_rows(param.index, torch.device("meta"))
        else:
            local = self.native.scatter(param.index, owned.detach() if param.is_owner else None)
        whole = torch.empty(param.parameter.shape, device="meta")
        rows = DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )
        if MODE.get() == "empty":
            return torch.empty_like(rows, device="cpu")
        rows = rows.cpu() if MODE.get() == "host" else rows
        rows._dmuon_rows = True  # memory of its own
        return rows

    def save_weight(self, index: int) -> DTensor:
        """Likewise of the master."""
        if self.saved is None:  # of a submodule's state dict
            self.begin("state_dict")
            return self.save(index, self.params[index].parameter)
        if index not in self.saved:
            self.saved[index] = self.save(index, self.params[index].parameter)
        return self.saved[index]

    def begin(self, caller: str, problem: str = "", expected: Entries = (), given: Entries = (), strict=True) -> None:
        """No rank has a problem, and all were given the same, which is what is expected; or all raise RuntimeError."""
        if MODE.get() not in ("shapes", "empty"):
            self.native.begin(caller, problem, list(expected), list(given), strict)

    def load(self, index: int, value: torch.Tensor, owned: torch.Tensor) -> None:
        """`owned`, on the owner, takes the values of a DTensor or of a tensor that is whole on every rank."""
        param = self.params[index]
        if isinstance(param, CutParam):
            return param.load(value, owned)
        whole = getattr(value, "device_mesh", None) != self.mesh or tuple(value.placements) != self.placements
        if isinstance(value, DTensor):
            value = value.to(value.device_mesh.device_type).full_tensor() if whole else value.to_local()
        self.native.gather(param.index, value, whole, owned.detach() if param.is_owner else None)


def attach_state_dict(model: nn.Module, dedication: Dedication, by_module: dict[nn.Module, list[Site]]) -> None:
    """Makes `state_dict` and `load_state_dict` of the model, and of its submodules, hold and take whole matrices."""
    rows = dedication.rows
    for module, sites in by_module.items():
        _attach_to_module(module, sites, dedication)
    this = weakref.ref(model)

    def begin(*_: Any) -> None:
        dedication.end_cut_off()
        rows.begin("state_dict")
        rows.saved = {}

    model.register_state_dict_pre_hook(begin)
    model.register_state_dict_post_hook(lambda *_: setattr(rows, "saved", None))

    def load_state_dict(state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As in torch, but all or nothing: keys and shapes are checked on all ranks before anything changes.

        Collective.  Values: DTensors of any sharding, or whole tensors on every rank.  assign: parameters that are not
        on the meta device keep their identity and take the values all the same.
        """
        model = this()
        assert model is not None
        with mode("shapes"):
            expected = model.state_dict()
        for each in find_dedications(model):
            each.rows.begin("load_state_dict", "", entries(expected), entries(state_dict), strict)
        if MODE.get() == "check":
            return None
        assign = assign and any(p.is_meta for p in model.parameters() if not is_dedicated(p))
        with mode("load"):
            result = type(model).load_state_dict(model, state_dict, strict=strict, assign=assign)
        publish(model)
        return result

    object.__setattr__(model, "load_state_dict", load_state_dict)


def _attach_to_module(module: nn.Module, sites: list[Site], dedication: Dedication) -> None:
    rows = dedication.rows

    def save(_: nn.Module, state_dict: dict[str, Any], prefix: str, *__: Any) -> None:
        for site in sites:
            state_dict[prefix + site.attribute] = rows.save_weight(site.index)

    def load(_: nn.Module, state_dict: dict[str, Any], prefix: str, *__: Any) -> None:
        for site in (site for site in sites if prefix + site.attribute in state_dict):
            key, parameter = prefix + site.attribute, rows.params[site.index].parameter
            if MODE.get() != "load":  # of a submodule, or of a model around the dedicated one
                expected, given = [(key, list(parameter.shape), "")], entries({key: state_dict[key]})
                rows.begin("load_state_dict", "", expected, given)
            rows.load(site.index, state_dict[key], parameter)
            state_dict[key] = parameter  # for torch, which now copies it onto itself

    module.register_state_dict_post_hook(save)
    module.register_load_state_dict_pre_hook(load)
    held = {site.index for site in sites}
    module.register_load_state_dict_post_hook(lambda *_: None if MODE.get() == "load" else dedication.publish(held))


def entries(state: Mapping[str, Any]) -> Entries:
    """What ranks compare.  Dedicated matrices, which may be given in any sharding, are meta tensors where expected."""
    return [(key, list(getattr(value, "shape", ())), _sharding(value)) for key, value in state.items()]


def _sharding(value: Any) -> str:
    if not isinstance(value, torch.Tensor) or value.is_meta:
        return ""
    if not isinstance(value, DTensor):
        return "whole"
    return f"cut by {value.placements} over {value.device_mesh.mesh_dim_names} {tuple(value.device_mesh.shape)}"
