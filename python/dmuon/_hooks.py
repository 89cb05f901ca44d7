"""Module surgery: which parameter a module holds when, and the calls into the C++ runtime around each forward."""

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn as nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from ._handles import Dedication, Site


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested tuples, lists, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from tensors_in(entry)
    elif isinstance(value, (tuple, list)):
        for entry in value:
            yield from tensors_in(entry)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for entry in dataclasses.fields(value):
            yield from tensors_in(getattr(value, entry.name, None))


def _eager(function: Callable) -> Callable:
    """Hooks never enter a compiled graph."""
    return torch._dynamo.disable(function, recursive=True)


class GroupHooks:
    """The forward hooks of one hook module."""

    def __init__(self, dedication: Dedication, index: int, sites: list[Site], output_dtype: torch.dtype | None) -> None:
        self.dedication = dedication
        self.index = index
        self.sites = sites
        self.output_dtype = output_dtype
        self.depth = 0
        self.in_backward = False
        """Whether the modules hold unsharded parameters for the backward that runs."""

    def attach(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(_eager(self.pre_forward), with_kwargs=True)
        module.register_forward_hook(_eager(self.post_forward), always_call=True)

    def pre_forward(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        leaves, spec = tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        outputs = self.dedication.runtime.pre_forward(self.index, [leaves[i] for i in places])
        for i, output in zip(places, outputs, strict=True):
            leaves[i] = output
        self.depth += 1
        self._register(self.dedication.unsharded)
        return tree_unflatten(leaves, spec)

    def post_forward(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """Also called when the forward raised, with no output."""
        self.depth = max(0, self.depth - 1)
        self._hide()
        tensors = list(tensors_in(output))
        self.dedication.runtime.post_forward(self.index, tensors)
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
            self._register(self.dedication.unsharded)
            _OpenBackward.of(self.dedication).groups.append(self)

    def end_backward(self) -> None:
        self.in_backward = False
        self._hide()

    def _hide(self) -> None:
        if self.depth == 0 and not self.in_backward:
            self._register([param.parameter for param in self.dedication.params])

    def _register(self, parameters: list[nn.Parameter]) -> None:
        for site in self.sites:
            site.module._parameters[site.attribute] = parameters[site.index]

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
        dedication.runtime.end_forward(list(tensors_in(output)))

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
