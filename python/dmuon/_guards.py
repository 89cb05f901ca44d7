"""What a dedicated model must not do by accident: move placeholders, change dtype, be copied."""

import functools
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.nn as nn

from ._cut import CutParam
from ._handles import DedicatedParam, Dedication, Site


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
        held = {site: module._parameters[site.attribute] for site in sites}
        aside = [site for site in sites if not _is_plain(dedication.params[site.index])]
        before = {site: _place_of(held[site]) for site in sites if site not in aside}
        for site in aside:
            module._parameters[site.attribute] = None
        (guarded_before or functools.partial(type(module)._apply, module))(fn, recurse)
        for site in aside:
            module._parameters[site.attribute] = held[site]
        for site, place in before.items():
            parameter = module._parameters[site.attribute]
            if parameter is not held[site] or _place_of(parameter) != place:
                dedication.replace(site.index, parameter)
        _apply_to_rows(fn, dedication, aside)
        return module

    object.__setattr__(module, "_apply", apply)


def _is_plain(param: DedicatedParam) -> bool:
    """Its registered parameter is an ordinary one, with memory of its own."""
    return param.is_owner and not isinstance(param, CutParam)


def _place_of(parameter: torch.Tensor) -> tuple[int, torch.device]:
    return parameter.data_ptr(), parameter.device


def _apply_to_rows(fn: Callable, dedication: Dedication, sites: list[Site]) -> None:
    """Of parameters that are cut, this rank's rows move."""
    for site in sites:
        param = dedication.params[site.index]
        if isinstance(param, CutParam) and (replaced := param.applied(fn)) is not None:
            dedication.replace(site.index, replaced)


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
