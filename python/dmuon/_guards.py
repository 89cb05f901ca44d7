"""What a dedicated model must not do by accident: move placeholders, change dtype, be copied."""

import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.nn as nn

from ._handles import Dedication, Site


def guard_apply(module: nn.Module, dedication: Dedication, sites: list[Site], name: str) -> None:
    """Lets `to`, `to_empty`, `cuda` and the like act on masters only: placeholders stay on the meta device.

    module: holds the parameters at `sites`, or encloses modules that do (then `sites` is empty).  name: of a dedicated
        parameter inside, for the message.

    Replaces `_apply` on this instance; the class's own (also FSDP2's, which swaps the class) still runs.
    """
    this = weakref.ref(module)
    guarded_before = module.__dict__.get("_apply")  # by another dedication
    dtype = dedication.params[0].parameter.dtype

    def apply(fn: Callable, recurse: bool = True) -> nn.Module:
        module = this()
        assert module is not None
        _check_dtype(fn, dtype, name)
        held = {site.index: module._parameters[site.attribute] for site in sites}
        before = {i: (p.data_ptr(), p.device) for i, p in held.items() if not p.is_meta}
        for site in sites:
            if not dedication.params[site.index].is_owner:
                module._parameters[site.attribute] = None
        if guarded_before is None:
            type(module)._apply(module, fn, recurse)
        else:
            guarded_before(fn, recurse)
        for site in sites:
            parameter = module._parameters[site.attribute]
            if parameter is None:
                module._parameters[site.attribute] = held[site.index]
            elif parameter is not held[site.index] or before.get(site.index) != (
                parameter.data_ptr(),
                parameter.device,
            ):
                dedication.replace(site.index, parameter)
        return module

    object.__setattr__(module, "_apply", apply)


def _check_dtype(fn: Callable, dtype: torch.dtype, name: str) -> None:
    found = fn(torch.empty(0, dtype=dtype)).dtype
    if found != dtype:
        raise ValueError(
            f"[dmuon] parameter {name!r}: the master's dtype is {dtype} and cannot become {found}; nothing was changed."
            " Choose the compute dtype with mp_policy=MixedPrecisionPolicy(param_dtype=...) in dedicate_params."
        )


def forbid_copies(module: nn.Module) -> None:
    """deepcopy and pickle would share or lose the masters: an error instead."""

    def refuse(*_: Any) -> NoReturn:
        raise TypeError(
            "[dmuon] a module with dedicated parameters cannot be copied or pickled: on each rank the matrices of "
            "other owners are meta tensors. Copy it before dedicate_params; for an EMA, copy its parameters()."
        )

    object.__setattr__(module, "__getstate__", refuse)
