"""Calls into the C++ runtime around each forward, and which parameter a module holds when."""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from ._handles import Dedication, Site

_ATTRIBUTE = "_dmuon_hooks"


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


def _outputs_of(module: nn.Module, output: Any) -> list[torch.Tensor]:
    """The output's tensors.  Raises RuntimeError for one that FSDP2 would overlook: it would lose gradients."""
    tensors = list(tensors_in(output))
    if isinstance(module, FSDPModule) and not isinstance(output, torch.Tensor):
        seen = {id(leaf) for leaf in tree_leaves(output)}
        if any(tensor.requires_grad and id(tensor) not in seen for tensor in tensors):
            raise RuntimeError(
                f"[dmuon] {type(module).__name__} returns tensors inside a class that torch's pytree does not know, "
                "and FSDP2 would not gather and reduce its parameters for them. Register the class "
                "(torch.utils._pytree.register_dataclass or register_pytree_node), or return a tuple or dict."
            )
    return tensors


class RootHooks:
    """Around the model's forward: one pass of gathers."""

    def __init__(self, dedication: Dedication) -> None:
        self.dedication = dedication

    def enter(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        self.dedication.runtime.begin_forward()
        return args, kwargs

    def leave(self, module: nn.Module, args: tuple, output: Any) -> Any:
        self.dedication.runtime.end_forward(_outputs_of(module, output))
        return output


class GroupHooks:
    """Around the forward of one hook module: its matrices are there while it runs."""

    def __init__(self, dedication: Dedication, index: int, sites: list[Site], output_dtype: torch.dtype | None) -> None:
        self.dedication = dedication
        self.index = index
        self.sites = sites
        self.output_dtype = output_dtype
        self.depth = 0
        self.in_backward = False
        """Whether the modules hold unsharded parameters for the backward that runs."""

    def enter(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        self._check_sites()
        leaves, spec = tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        outputs = self.dedication.runtime.pre_forward(self.index, [leaves[i] for i in places])
        for i, output in zip(places, outputs, strict=True):
            leaves[i] = output
        self.depth += 1
        self._register(self.dedication.unsharded)
        return tree_unflatten(leaves, spec)

    def leave(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """Also called when the forward raised, with no output."""
        self.depth = max(0, self.depth - 1)
        self._hide()
        outputs = _outputs_of(module, output)
        self.dedication.runtime.post_forward(self.index, outputs)
        if torch.is_grad_enabled():
            for tensor in outputs:
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

    def _check_sites(self) -> None:
        params, unsharded = self.dedication.params, self.dedication.unsharded
        for site in self.sites:
            held = site.module._parameters.get(site.attribute)
            if held is not params[site.index].parameter and held is not unsharded[site.index]:
                raise RuntimeError(
                    f"[dmuon] parameter {params[site.index].name!r} was replaced after dedicate_params (assignment of "
                    "a new Parameter, pruning, parametrization): training would use neither the one nor the other. "
                    "Replace it before dedicate_params; to change values, copy into the owner's parameter and call "
                    "dmuon.publish(model)."
                )

    def _cast_output(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.output_dtype) if tensor.is_floating_point() else tensor


class _OpenBackward:
    """The groups that a backward has opened.  Lives as long as autograd's graph task: it ends with a failed one too."""

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


Hooks = RootHooks | GroupHooks


def attach_hooks(module: nn.Module, hooks: list[Hooks]) -> None:
    """`hooks` enter in this order and leave in the reverse one; those of the root come first."""
    object.__setattr__(module, _ATTRIBUTE, [*module.__dict__.get(_ATTRIBUTE, []), *hooks])
    for hook in hooks:
        module.register_forward_pre_hook(_eager(hook.enter), with_kwargs=True)
    for hook in reversed(hooks):
        module.register_forward_hook(_eager(hook.leave), always_call=True)


def register_forward_method(module: nn.Module, method_name: str) -> None:
    """Makes `module.method_name(...)` gather like a forward: for `model.encode(x)` and the like, which call submodules
    but not the model itself.  Methods that only call the model (`generate`) need nothing.

    The name and the use of FSDP2's `register_fsdp_forward_method`; call both where the module is also fully sharded.
    Raises ValueError for a module without the method, or one that is neither the model given to dedicate_params nor a
    hook module.
    """
    hooks: list[Hooks] = module.__dict__.get(_ATTRIBUTE, [])
    if not hooks:
        raise ValueError(
            f"[dmuon.register_forward_method] {type(module).__name__} is neither the model given to dedicate_params "
            "nor a hook module; register the method on one of those"
        )
    original = getattr(module, method_name, None)
    if not callable(original):
        raise ValueError(f"[dmuon.register_forward_method] {type(module).__name__} has no method {method_name!r}")
    function = getattr(original, "__func__", None)
    this = weakref.ref(module)

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        module = this()
        call = functools.partial(function, module) if function else original
        entered: list[Hooks] = []
        output = None
        try:
            for hook in hooks:
                args, kwargs = hook.enter(module, args, kwargs)
                entered.append(hook)
            output = call(*args, **kwargs)
        finally:
            for hook in reversed(entered):
                output = hook.leave(module, args, output)
        return output

    object.__setattr__(module, method_name, _eager(method))
