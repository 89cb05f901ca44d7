"""Composition with FSDP2: it skips dedicated parameters, and its controls reach our groups too."""

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator

import torch.nn as nn
from torch.distributed.fsdp._fully_shard import _fsdp_init

from ._handles import Dedication, find_dedications, is_dedicated

_PATCHED = "_get_managed_states"
_SIGNATURE = ["modules", "ignored_params"]


def install_patch() -> None:
    """Makes `fully_shard` skip dedicated parameters without being told.  Idempotent; done by `import dmuon`.

    Raises RuntimeError if this torch's function is not the one known; then pass
    `fully_shard(..., ignored_params=set(assignment))`, which needs no patch.
    """
    original = getattr(_fsdp_init, _PATCHED, None)
    if hasattr(original, "_dmuon_original"):
        return
    if original is None or list(inspect.signature(original).parameters) != _SIGNATURE:
        raise RuntimeError(
            f"[dmuon.install_patch] this torch has no torch.distributed.fsdp {_PATCHED}({', '.join(_SIGNATURE)}); "
            "pass ignored_params=set(assignment) to every fully_shard call instead, which needs no patch"
        )

    @functools.wraps(original)
    def skip_dedicated(modules: list[nn.Module], ignored_params: set[nn.Parameter] | None = None) -> tuple:
        dedicated = {
            parameter for module in modules for parameter in module.parameters(recurse=False) if is_dedicated(parameter)
        }
        return original(modules, dedicated | (ignored_params or set()))

    skip_dedicated._dmuon_original = original  # type: ignore[attr-defined]
    setattr(_fsdp_init, _PATCHED, skip_dedicated)


def uninstall_patch() -> None:
    """Gives torch its own function back.  Idempotent."""
    patched = getattr(_fsdp_init, _PATCHED)
    setattr(_fsdp_init, _PATCHED, getattr(patched, "_dmuon_original", patched))


def share_controls(root: nn.Module, hook_modules: list[nn.Module], dedication: Dedication) -> None:
    """FSDP2's controls, called on the root or on a hook module, act on our groups as well.

    `set_requires_gradient_sync` and `set_reshard_after_forward` become attributes of these instances, and
    `set_gradient_divide_factor` and `set_requires_all_reduce` of the root; FSDP2's own method still runs where the
    module is fully sharded.
    """
    runtime = dedication.runtime

    def add(module: nn.Module, name: str, act: Callable[[bool, int], None]) -> None:
        this = weakref.ref(module)
        within = set(module.modules())
        all_inside = [i for i, hooked in enumerate(hook_modules) if hooked in within]
        own = [i for i, hooked in enumerate(hook_modules) if hooked is module]

        def control(value: bool, *, recurse: bool = True) -> None:
            module = this()
            if theirs := getattr(type(module), name, None):
                theirs(module, value, recurse=recurse)
            for group in all_inside if recurse else own:
                act(value, group)

        object.__setattr__(module, name, control)

    for module in {id(m): m for m in [root, *hook_modules]}.values():
        add(module, "set_requires_gradient_sync", runtime.set_requires_gradient_sync)
        add(module, "set_reshard_after_forward", runtime.set_reshard_after_forward)

    this_root = weakref.ref(root)

    def add_to_root(name: str, act: Callable) -> None:
        def control(value: bool | float, **kwargs: bool) -> None:
            root = this_root()
            if theirs := getattr(type(root), name, None):
                theirs(root, value, **kwargs)
            act(value)

        object.__setattr__(root, name, control)

    add_to_root("set_gradient_divide_factor", runtime.set_gradient_divide_factor)
    add_to_root("set_requires_all_reduce", runtime.set_requires_all_reduce)


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backward inside keeps gradients on each rank, for dedicated and FSDP2 parameters; the next one outside adds and
    reduces them.  May be nested: every level restores what it found.
    """
    dedications = list(find_dedications(model))
    ours = [(d.runtime, i, d.runtime.requires_gradient_sync(i)) for d in dedications for i in range(len(d.groups))]
    theirs = list(_fsdp_groups(model))
    before = [(group, group.reduce_grads) for group in theirs]
    try:
        for runtime, index, _ in ours:
            runtime.set_requires_gradient_sync(False, index)
        for group in theirs:
            group.reduce_grads = False
        yield
    finally:
        for runtime, index, value in ours:
            runtime.set_requires_gradient_sync(value, index)
        for group, value in before:
            group.reduce_grads = value


def _fsdp_groups(model: nn.Module) -> Iterator:
    """FSDP2's parameter groups: the only place that reads its private state, because it offers no getter."""
    for module in model.modules():
        if hasattr(type(module), "set_requires_gradient_sync") and hasattr(module, "_get_fsdp_state"):
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)
            if groups is None:
                groups = [state._fsdp_param_group] if state._fsdp_param_group else []
            yield from groups
