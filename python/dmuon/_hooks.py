"""Calls into the C++ runtime around each forward, and which parameter a module holds when."""

import dataclasses
import functools
import operator
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves, tree_map_only

from ._handles import Dedication, Site
from ._running import running_calls

_ATTRIBUTE = "_dmuon_hooks"
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

    def hook(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return disabled(*args, **kwargs)
        return function(*args, **kwargs)

    return hook


def _check_fsdp2_sees(module: nn.Module, output: Any, tensors: list[torch.Tensor]) -> None:
    """Raises RuntimeError for a tensor in the output that FSDP2 would overlook: it would lose gradients."""
    if isinstance(module, FSDPModule) and not isinstance(output, torch.Tensor):
        seen = {id(leaf) for leaf in tree_leaves(output)}
        if any(tensor.requires_grad and id(tensor) not in seen for tensor in tensors):
            raise RuntimeError(
                f"[dmuon] {type(module).__name__} returns tensors inside a class that torch's pytree does not know, "
                "and FSDP2 would not gather and reduce its parameters for them. Register the class "
                "(torch.utils._pytree.register_dataclass or register_pytree_node), or return a tuple or dict."
            )


class RootHooks:
    """Around the model's forward: one pass of gathers."""

    def __init__(self, dedication: Dedication, model: nn.Module) -> None:
        self.dedication = dedication
        self.groups: list[GroupHooks] = []
        self.depth = 0
        self.methods = 0
        """Calls of registered methods, which end their pass whatever is raised."""
        self._model = weakref.ref(model)

    def end_cut_off(self, entering: int = 0) -> None:
        """Ends what nobody runs any more: after KeyboardInterrupt and the like torch calls no hooks.

        entering: calls of the model that run, but have not opened a pass yet.
        """
        if self.depth == 0 and not any([group.depth for group in self.groups]):
            return
        model = self._model()
        if model is None or running_calls(model) + self.methods > entering:
            return
        for hook in [*self.groups, self]:
            while hook.depth > 0:
                hook.leave(model, (), None)

    def enter(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        self.end_cut_off(entering=1)
        self.dedication.runtime.begin_forward()
        self.depth += 1
        return args, kwargs

    def leave(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """As GroupHooks.leave."""
        if self.depth > 0:
            self.depth -= 1
            outputs = tensors_in(output)
            self.dedication.runtime.end_forward(outputs)
            _check_fsdp2_sees(module, output, outputs)
        return output


class GroupHooks:
    """Around the forward of one hook module: its matrices are there while it runs."""

    def __init__(self, dedication: Dedication, index: int, sites: list[Site], output_dtype: torch.dtype | None) -> None:
        self.dedication = dedication
        self.index = index
        # The dict of a module's parameters, not the module: hooks are part of it and must not keep it alive.
        self.sites = [
            (site.module._parameters, site.attribute, dedication.unsharded[site.index], dedication.params[site.index])
            for site in sites
        ]
        self.output_dtype = output_dtype
        self.pre_forward = dedication.runtime.pre_forward  # looking a method up costs more than calling it
        self.post_forward = dedication.runtime.post_forward
        self.depth = 0
        self.in_backward = False
        """Whether the modules hold unsharded parameters for the backward that runs."""

    def enter(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        self._check_sites()
        self.depth += 1
        if not kwargs and all([isinstance(arg, torch.Tensor) for arg in args]):  # the usual call
            outputs = self.pre_forward(self.index, args)
            self._show()
            return tuple(outputs), kwargs
        inputs: list[torch.Tensor] = []
        map_tensors(lambda tensor: inputs.append(tensor) or tensor, (args, kwargs))
        outputs = self.pre_forward(self.index, inputs)
        self._show()
        if all(map(operator.is_, outputs, inputs)):
            return args, kwargs
        following = iter(outputs)
        return map_tensors(lambda _: next(following), (args, kwargs))

    def leave(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """Also called when the forward raised, with no output, and when something raised before `enter`."""
        if self.depth == 0:
            return output
        self.depth -= 1
        self._hide()
        outputs = tensors_in(output)
        self.post_forward(self.index, outputs)
        _check_fsdp2_sees(module, output, outputs)
        if torch.is_grad_enabled():
            for tensor in outputs:
                if tensor.grad_fn is not None:
                    tensor.register_hook(self._pre_backward)
        if self.output_dtype is not None:
            return map_tensors(self._cast_output, output)
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
        for parameters, attribute, unsharded, _ in self.sites:
            parameters[attribute] = unsharded

    def _hide(self) -> None:
        """They hold the registered ones again, unless somebody still runs inside."""
        if self.depth == 0 and not self.in_backward:
            for parameters, attribute, _, param in self.sites:
                parameters[attribute] = param.parameter

    def _check_sites(self) -> None:
        for parameters, attribute, unsharded, param in self.sites:
            held = parameters.get(attribute)
            if not param.intact or (held is not param.parameter and held is not unsharded):
                raise RuntimeError(
                    f"[dmuon] parameter {param.name!r} was replaced after dedicate_params (assignment of a new "
                    "Parameter, pruning, parametrization): training would use neither the one nor the other. Replace "
                    "it before dedicate_params; to change values, copy into the owner's parameter and call "
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
    roots = [hook for hook in hooks if isinstance(hook, RootHooks)]

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        module = this()
        call = functools.partial(function, module) if function else original
        entered: list[Hooks] = []
        output = None
        for root in roots:
            root.methods += 1
        try:
            for hook in hooks:
                args, kwargs = hook.enter(module, args, kwargs)
                entered.append(hook)
            output = call(*args, **kwargs)
        finally:
            for root in roots:
                root.methods -= 1
            for hook in reversed(entered):
                output = hook.leave(module, args, output)
        return output

    object.__setattr__(module, method_name, _eager(method))
