"""Which parameters are dedicated, where modules hold them, and which module triggers their communication."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from ._handles import Site, is_dedicated

_LAYER = re.compile(r"^(?:.*\.)?(?:layers|blocks)\.\d+(?=\.|$)")
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)

Predicate = Callable[[str, nn.Parameter], bool]
BoundaryPredicate = Callable[[nn.Module], bool]


@dataclass
class Matrix:
    """A selected parameter before it is dedicated."""

    name: str
    parameter: nn.Parameter
    sites: list[Site]
    site_names: list[str]
    boundary: str = ""
    """Fully qualified name of its hook module; "" is the root."""
    layer: str = ""

    def describe(self) -> str:
        """What all ranks must agree on."""
        p = self.parameter
        rows, cols = p.shape
        return f"{self.name} {rows} {cols} {self.layer or '-'} {p.dtype} grad={p.requires_grad} meta={p.is_meta}"


@dataclass
class Boundary:
    """How hook modules are found: `predicate` picks the lowest ancestor, else names and module lists decide."""

    predicate: BoundaryPredicate | None = None
    strict: bool = True
    modules: dict[str, nn.Module] = field(default_factory=dict)

    def find(self, parent: str) -> str:
        """The hook module of a parameter held by module `parent`."""
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
        return self._by_structure(parent, chain)

    def _by_structure(self, parent: str, chain: list[str]) -> str:
        if match := _LAYER.match(parent):
            return match.group(0)
        for name in reversed(chain[:-1]):  # outermost first: an entry of a ModuleList is a layer
            if isinstance(self.modules[name.rpartition(".")[0]], _CONTAINERS):
                return name
        return parent

    def common(self, names: list[str]) -> str:
        """The lowest module that contains all of them and can be called."""
        chains = [_ancestors(name) for name in names]
        for name in chains[0]:
            if all(name in chain for chain in chains) and not isinstance(self.modules[name], _CONTAINERS):
                return name
        return ""


def _ancestors(name: str) -> list[str]:
    """The module itself, its parents, and the root ("")."""
    parts = name.split(".") if name else []
    return [".".join(parts[:i]) for i in range(len(parts), -1, -1)]


def _check(name: str, parameter: nn.Parameter) -> None:
    if is_dedicated(parameter):
        raise ValueError(f"parameter {name!r} is dedicated already; dedicate_params may see a parameter once")
    if isinstance(parameter, DTensor):
        raise ValueError(
            f"parameter {name!r} is a DTensor (fully_shard or tensor parallelism took it). Call dedicate_params before "
            "fully_shard; tensor-parallel matrices are not supported yet"
        )
    if parameter.ndim != 2 or 0 in parameter.shape:
        raise ValueError(
            f"parameter {name!r} has shape {tuple(parameter.shape)}; the predicate must select 2-D matrices"
        )
    if not parameter.dtype.is_floating_point or parameter.dtype.itemsize < 2:
        raise ValueError(
            f"parameter {name!r} has dtype {parameter.dtype}; expected float32, bfloat16, float16 or float64"
        )


def select(model: nn.Module, predicate: Predicate, boundary: Boundary) -> list[Matrix]:
    """The matrices in module order, each with its hook module.  Raises ValueError naming the parameter."""
    boundary.modules = dict(model.named_modules())
    found: dict[int, Matrix] = {}
    for module_name, module in boundary.modules.items():
        for attribute, parameter in module._parameters.items():
            if parameter is None:
                continue
            name = f"{module_name}.{attribute}" if module_name else attribute
            matrix = found.get(id(parameter))
            if matrix is None:
                if not predicate(name, parameter):
                    continue
                _check(name, parameter)
                matrix = found[id(parameter)] = Matrix(name, parameter, [], [])
            matrix.sites.append(Site(module, attribute))
            matrix.site_names.append(module_name)
    if not found:
        raise ValueError("no parameter satisfies the predicate; print model.named_parameters() to see the names")
    for matrix in found.values():
        boundaries = [boundary.find(name) for name in matrix.site_names]
        matrix.boundary = boundaries[0] if len(set(boundaries)) == 1 else boundary.common(boundaries)
        matrix.layer = matrix.boundary
    return list(found.values())


def group_by_boundary(matrices: list[Matrix], modules: dict[str, nn.Module]) -> list[tuple[str, list[int]]]:
    """(hook module, indices of its matrices), in module order."""
    members: dict[str, list[int]] = {}
    for index, matrix in enumerate(matrices):
        members.setdefault(matrix.boundary, []).append(index)
    names = [name for name in modules if name in members]
    for name in names:
        dtypes = {matrices[i].parameter.dtype for i in members[name]}
        if len(dtypes) > 1:
            raise ValueError(f"the matrices of hook module {name!r} have dtypes {dtypes}; one group has one dtype")
    return [(name, members[name]) for name in names]


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
