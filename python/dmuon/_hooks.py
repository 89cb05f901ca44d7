"""Module surgery: which parameter a module holds when, and the calls into the C++ runtime around each forward."""

import dataclasses
import operator
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn as nn
from torch.utils._pytree import tree_map_only

from ._handles import Dedication, Site

_ATOMS = frozenset((type(None), bool, int, float, str, torch.dtype, torch.device))


def tensors_in(value: Any, found: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
    """All tensors in nested tuples, lists, mappings and dataclasses."""
    found = [] if found is None else found
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif type(value) in _ATOMS:
        pass
    elif isinstance(value, Mapping):
        for entry in value.values():
            tensors_in(entry, found)
    elif isinstance(value, (tuple, list)):
        for entry in value:
            tensors_in(entry, found)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for entry in dataclasses.fields(value):
            tensors_in(getattr(value, entry.name, None), found)
    return found


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """pytree's map over tensors; several times quicker for the containers that modules are usually called with."""
    if isinstance(value, torch.Tensor):
        return function(value)
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is tuple or kind is list:
        return kind([map_tensors(function, entry) for entry in value])
    if kind is dict:
        return {key: map_tensors(function, entry) for key, entry in value.items()}
    return tree_map_only(torch.Tensor, function, value)


def _eager(function: Callable) -> Callable:
    """Hooks never enter a compiled graph.  Where nothing is being compiled they are called without a detour."""
    disabled = torch._dynamo.disable(function, recursive=True)

    def hook(*args: Any) -> Any:
        return disabled(*args) if torch.compiler.is_dynamo_compiling() else function(*args)

    return hook


class GroupHooks:
    """The forward hooks of one hook module."""

    def __init__(self, dedication: Dedication, index: int, sites: list[Site], output_dtype: torch.dtype | None) -> None:
        self.dedication = dedication
        self.index = index
        self.sites = [
            (site.module, site.attribute, dedication.unsharded[site.index], dedication.params[site.index])
            for site in sites
        ]
        self.output_dtype = output_dtype
        self.enter = dedication.runtime.pre_forward  # looking a method up costs more than calling it
        self.leave = dedication.runtime.post_forward
        self.depth = 0
        self.in_backward = False
        """Whether the modules hold unsharded parameters for the backward that runs."""

    def attach(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(_eager(self.pre_forward), with_kwargs=True)
        module.register_forward_hook(_eager(self.post_forward), always_call=True)

    def pre_forward(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        inputs: list[torch.Tensor] = []
        map_tensors(lambda tensor: inputs.append(tensor) or tensor, (args, kwargs))
        outputs = self.enter(self.index, inputs)
        self.depth += 1
        self._show()
        if all(map(operator.is_, outputs, inputs)):
            return None
        following = iter(outputs)
        return map_tensors(lambda _: next(following), (args, kwargs))

    def post_forward(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """Also called when the forward raised, with no output."""
        self.depth = max(0, self.depth - 1)
        self._hide()
        tensors = tensors_in(output)
        self.leave(self.index, tensors)
        if torch.is_grad_enabled():
            for tensor in tensors:
                if tensor.grad_fn is not None:
                    tensor.register_hook(self._pre_backward)
        if self.output_dtype is not None:
            return tree_map_only(torch.Tensor, self._cast_output, output)
        return output

    def _pre_backward(self, gradient: torch.Tensor) -> None:
        """A checkpoint inside the module's forward runs parts of it again in backward, without our forward hooks."""
        if not self.in_backward:
            self.in_backward = True
            self._show()
            _OpenBackward.of(self.dedication).groups.append(self)

    def end_backward(self) -> None:
        self.in_backward = False
        self._hide()

    def _show(self) -> None:
        """The modules hold unsharded parameters."""
        for module, attribute, unsharded, _ in self.sites:
            module._parameters[attribute] = unsharded

    def _hide(self) -> None:
        """They hold the registered ones again, unless somebody still runs inside."""
        if self.depth == 0 and not self.in_backward:
            for module, attribute, _, param in self.sites:
                module._parameters[attribute] = param.parameter

    def _cast_output(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.output_dtype) if tensor.is_floating_point() else tensor


class _OpenBackward:
    """The groups that a backward has opened.  It lives as long as autograd's graph task, so it ends with a failed one
    too.
    """

    def __init__(self) -> None:
        self.groups: list[GroupHooks] = []

    @staticmethod
    def of(dedication: Dedication) -> "_OpenBackward":
        backward = dedication.backward()
        if backward is None:
            backward = _OpenBackward()
            dedication.backward = weakref.ref(backward)
            torch.autograd.Variable._execution_engine.queue_callback(backward.close)
        return backward

    def close(self) -> None:
        while self.groups:
            self.groups.pop().end_backward()

    __del__ = close


def attach_root_begin(model: nn.Module, dedication: Dedication) -> None:
    """Must be the first of our hooks on the root."""
    model.register_forward_pre_hook(_eager(lambda module, args: dedication.runtime.begin_forward()))


def attach_root_end(model: nn.Module, dedication: Dedication) -> None:
    """Must be the last of our hooks on the root."""

    def end_forward(module: nn.Module, args: tuple, output: Any) -> None:
        dedication.runtime.end_forward(tensors_in(output))

    model.register_forward_hook(_eager(end_forward), always_call=True)


def guard_apply(module: nn.Module, dedication: Dedication, sites: list[Site]) -> None:
    """Lets `to`, `to_empty`, `cuda` and the like act on masters only: placeholders stay on the meta device.

    Replaces the module's `_apply` on this instance; the class's own (also FSDP2's, which swaps the class) still runs.
    """

    def apply(fn: Callable, recurse: bool = True) -> nn.Module:
        held = {site.index: module._parameters[site.attribute] for site in sites}
        before = {i: (p.data_ptr(), p.device) for i, p in held.items() if not p.is_meta}
        for site in sites:
            if not dedication.params[site.index].is_owner:
                module._parameters[site.attribute] = None
        type(module)._apply(module, fn, recurse)
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


def forbid_state_dict(model: nn.Module) -> None:
    """Saving would write meta tensors for matrices of other ranks: an error, not a file without weights."""

    def refuse(module: nn.Module, *_: Any) -> None:
        raise NotImplementedError(
            "[dmuon] state_dict and load_state_dict of a model with dedicated parameters are not supported yet: "
            "on each rank the matrices of other owners are meta tensors. Save and load before dedicate_params, or read "
            "the masters through dmuon.get_dedicated_params(model) on their owners."
        )

    model.register_state_dict_post_hook(refuse)
    model.register_load_state_dict_pre_hook(refuse)
