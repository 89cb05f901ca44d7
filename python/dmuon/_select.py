"""Which parameters are dedicated, where modules hold them, and which module triggers their communication."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from ._handles import Site, is_dedicated

_LAYER = re.compile(r"^(?:.*\.)?(?:layers|blocks)\.\d+(?=\.|$)")
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
_LISTS = (nn.ParameterList, nn.ParameterDict)
_SMALL = 1 << 16
"""Elements.  A smaller elementwise parameter is not worth a group of its own: it would only hold up its neighbours'."""

Predicate = Callable[[str, nn.Parameter], bool]
BoundaryPredicate = Callable[[nn.Module], bool]


@dataclass
class Matrix:
    """A selected parameter before it is dedicated."""

    parameter: nn.Parameter
    names: list[str] = field(default_factory=list)
    """Fully qualified; more than one if it is tied.  The first one counts."""
    sites: list[Site] = field(default_factory=list)
    site_names: list[str] = field(default_factory=list)
    """Of the modules that hold it."""
    elementwise: bool = False
    """Stepped by AdamW, and of any shape."""
    boundary: str = ""
    """Fully qualified name of its hook module; "" is the root."""
    layer: str = ""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def plan_input(self) -> tuple[str, int, int, str, bool]:
        """Of an elementwise parameter the first dimension and the product of the others."""
        shape = self.parameter.shape
        return self.name, shape[0], math.prod(shape[1:]), self.layer, self.elementwise

    def describe(self) -> str:
        """What all ranks must agree on."""
        p, (name, rows, cols, layer, _) = self.parameter, self.plan_input
        kind = f" elementwise={'x'.join(map(str, p.shape))}" if self.elementwise else ""
        return f"{name} {rows} {cols} {layer or '-'} {p.dtype} grad={p.requires_grad} meta={p.is_meta}{kind}"


@dataclass
class Boundary:
    """How hook modules are found: `predicate` picks the lowest ancestor, else names and module lists decide."""

    predicate: BoundaryPredicate | None = None
    strict: bool = True
    modules: dict[str, nn.Module] = field(default_factory=dict)

    def find(self, parent: str, small: bool = False) -> str:
        """The hook module of a parameter held by module `parent`.  Without a predicate, small elementwise ones outside
        layers belong to the root.
        """
        chain = _ancestors(parent)
        if self.predicate is not None:
            for name in chain:
                if self.predicate(self.modules[name]):
                    return name
            if self.strict:
                raise ValueError(
                    f"no ancestor of module {parent!r} satisfies hook_boundary_predicate. Make it true for one of "
                    f"{chain}, or pass hook_boundary_strict=False to hook the module itself"
                )
            return parent
        return self._by_structure(parent, chain, small)

    def _by_structure(self, parent: str, chain: list[str], small: bool) -> str:
        if match := _LAYER.match(parent):
            return match.group(0)
        while isinstance(self.modules[chain[0]], _LISTS):  # it is never called
            chain = chain[1:]
        for name in reversed(chain[:-1]):  # outermost first: an entry of a ModuleList is a layer
            if isinstance(self.modules[name.rpartition(".")[0]], _CONTAINERS):
                return name
        alone = "" if small else chain[0]
        return next((name for name in chain if isinstance(self.modules[name], nn.MultiheadAttention)), alone)

    def common(self, names: list[str]) -> str:
        """The lowest module that contains all of them and can be called."""
        chains = [_ancestors(name) for name in names]
        for name in chains[0]:
            if all(name in chain for chain in chains) and not isinstance(self.modules[name], _CONTAINERS + _LISTS):
                return name
        return ""


def _ancestors(name: str) -> list[str]:
    """The module itself, its parents, and the root ("")."""
    parts = name.split(".") if name else []
    return [".".join(parts[:i]) for i in range(len(parts), -1, -1)]


def _check_modules(matrix: Matrix) -> None:
    """Each module that holds it computes with what it holds."""
    for module in (site.module for site in matrix.sites):
        if isinstance(module, nn.RNNBase):
            raise ValueError(
                f"parameter {matrix.name!r} is one of {type(module).__name__}, which computes with a list of its own "
                "of its weights and would not see those that dmuon gathers. Leave it to fully_shard"
            )
        if getattr(module, "max_norm", None) is not None and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            raise ValueError(
                f"parameter {matrix.name!r} is of an embedding with max_norm, which changes its weight in forward: on "
                "a copy that is thrown away. Do without max_norm"
            )


def _check(matrix: Matrix) -> None:
    name, parameter = matrix.name, matrix.parameter
    if is_dedicated(parameter):
        raise ValueError(f"parameter {name!r} is dedicated already; dedicate_params may see a parameter once")
    if isinstance(parameter, DTensor):
        raise ValueError(
            f"parameter {name!r} is a DTensor (fully_shard or tensor parallelism took it). Call dedicate_params before "
            "fully_shard; tensor-parallel matrices are not supported yet"
        )
    if not matrix.elementwise and (parameter.ndim != 2 or 0 in parameter.shape):
        raise ValueError(
            f"parameter {name!r} has shape {tuple(parameter.shape)}; the predicate must select 2-D matrices. Leave it "
            "to elementwise=, which takes parameters of any shape"
        )
    if parameter.ndim == 0 or 0 in parameter.shape:
        raise ValueError(
            f"parameter {name!r} has shape {tuple(parameter.shape)}; elementwise parameters need a dimension and an "
            "element. Make a scalar a tensor of shape (1,), as FSDP2 asks for too"
        )
    if not parameter.dtype.is_floating_point or parameter.dtype.itemsize < 2:
        raise ValueError(
            f"parameter {name!r} has dtype {parameter.dtype}; expected float32, bfloat16, float16 or float64"
        )


def _parameters(modules: dict[str, nn.Module]) -> Iterator[Matrix]:
    """All parameters in module order, each once with all places that hold it."""
    found: dict[int, Matrix] = {}
    for module_name, module in modules.items():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                matrix = found.setdefault(id(parameter), Matrix(parameter))
                matrix.names.append(f"{module_name}.{attribute}" if module_name else attribute)
                matrix.sites.append(Site(module, attribute))
                matrix.site_names.append(module_name)
    yield from found.values()


def _is_selected(matrix: Matrix, predicate: Predicate, elementwise: Predicate | None) -> bool:
    """Whether it is dedicated under any of its names; sets `elementwise`."""
    as_matrix = [name for name in matrix.names if predicate(name, matrix.parameter)]
    if elementwise is None:
        return bool(as_matrix)
    others = [name for name in matrix.names if name not in as_matrix and elementwise(name, matrix.parameter)]
    if as_matrix and others:
        raise ValueError(
            f"one parameter has the names {as_matrix[0]!r}, a matrix by the predicate, and {others[0]!r}, which only "
            "elementwise= selects: tied parameters are one or the other. Decide the same for all their names"
        )
    matrix.elementwise = bool(others)
    return bool(as_matrix or others)


def select(model: nn.Module, predicate: Predicate, elementwise: Predicate | None, boundary: Boundary) -> list[Matrix]:
    """The matrices and elementwise parameters in module order, each with its hook module.  Raises ValueError naming the
    parameter.
    """
    boundary.modules = dict(model.named_modules())
    found = [matrix for matrix in _parameters(boundary.modules) if _is_selected(matrix, predicate, elementwise)]
    if all(matrix.elementwise for matrix in found):
        raise ValueError("no parameter satisfies the predicate; print model.named_parameters() to see the names")
    for matrix in found:
        _check(matrix)
        _check_modules(matrix)
        small = matrix.elementwise and matrix.parameter.numel() < _SMALL
        boundaries = [boundary.find(name, small) for name in matrix.site_names]
        matrix.boundary = boundaries[0] if len(set(boundaries)) == 1 else boundary.common(boundaries)
        matrix.layer = matrix.boundary
    return found


def group_by_boundary(matrices: list[Matrix], modules: dict[str, nn.Module]) -> list[tuple[str, list[int]]]:
    """(hook module, indices of what it triggers), in module order."""
    members: dict[str, list[int]] = {}
    for index, matrix in enumerate(matrices):
        members.setdefault(matrix.boundary, []).append(index)
    names = [name for name in modules if name in members]
    for name in names:
        dtypes = {matrices[i].parameter.dtype for i in members[name]}
        if len(dtypes) > 1:
            of = {matrices[i].parameter.dtype: matrices[i].name for i in reversed(members[name])}
            raise ValueError(
                f"the parameters of hook module {name!r} have dtypes "
                f"{', '.join(f'{dtype} ({first})' for dtype, first in of.items())}; one group has one dtype"
            )
    return [(name, members[name]) for name in names]


def check_dtypes(matrices: list[Matrix], param_dtype: torch.dtype | None) -> None:
    """All groups compute in one dtype, and all masters have one; ValueError naming two parameters that differ."""
    first = matrices[0]
    for other in matrices:
        mine, theirs = (param_dtype or m.parameter.dtype for m in (first, other))
        masters = [master_dtype(m.parameter.dtype) for m in (first, other)]
        if mine != theirs or masters[0] != masters[1]:
            raise ValueError(
                f"parameter {first.name!r} has dtype {first.parameter.dtype}, {other.name!r} {other.parameter.dtype}; "
                "one call dedicates parameters of one dtype. Name the dtype to compute with in "
                "mp_policy=MixedPrecisionPolicy(param_dtype=...) (fp64 mixes with no other), or leave one of them to "
                "fully_shard"
            )


def names_inside(matrices: list[Matrix]) -> dict[str, str]:
    """Every module around a matrix (itself included), with the name of the first matrix inside."""
    inside: dict[str, str] = {}
    for matrix in matrices:
        for site_name in matrix.site_names:
            for ancestor in _ancestors(site_name):
                inside.setdefault(ancestor, matrix.name)
    return inside


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """Masters are fp32, or fp64 for an fp64 model."""
    return dtype if dtype == torch.float64 else torch.float32
