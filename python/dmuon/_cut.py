"""Large elementwise parameters, cut by rows over all ranks: to users Shard(0) DTensors, as FSDP2's parameters are."""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ._handles import DedicatedParam, is_cut

LEAST_ELEMENTS: int = torch.ops.dmuon.cut_elements()
"""Smaller ones are owned whole."""

PlanRow = tuple[str, list[int], str, bool]
"""What the plan takes of a parameter or a part: name, numbers, layer key, elementwise."""


class PlanRows:
    """The rows of a plan, and which of them a parameter has: one, or one for each part in row order."""

    def __init__(self, parameters: Sequence[tuple[str, int, int, str, bool]], shard: int, replicate: int) -> None:
        """parameters: (name, rows, columns, layer key, elementwise); large elementwise ones are cut."""
        self.shape = (shard, replicate)
        self.rows: list[PlanRow] = []
        self.places: list[list[int]] = []
        for name, height, width, layer, elementwise in parameters:
            cut = torch.classes.dmuon.Plan.cut_by_rows
            parts = cut(name, height, width, [shard, replicate], LEAST_ELEMENTS) if elementwise else []
            entries = parts or [(name, [height, width])]
            self.places.append(list(range(len(self.rows), len(self.rows) + len(entries))))
            self.rows += [(part, numbers, layer, elementwise) for part, numbers in entries]

    def members(self, groups: list[tuple[str, list[int]]]) -> list[tuple[str, list[int]]]:
        """Groups of parameters as groups of rows."""
        return [(name, [row for i in indices for row in self.places[i]]) for name, indices in groups]

    def part(self, row: int) -> tuple[int, int]:
        """The first row of the parameter that it has, and the one after its last."""
        height, _, first, *_ = self.rows[row][1]
        return first, first + height

    def plan(self, owner_strategy: str, small_param_threshold: int | None = None) -> torch.ScriptObject:
        threshold = torch.ops.dmuon.small_param_threshold() if small_param_threshold is None else small_param_threshold
        return torch.classes.dmuon.Plan(self.rows, *self.shape, owner_strategy, threshold)


class CutMesh:
    """All ranks of a model, in the order in which the plan cuts."""

    def __init__(self, mesh: DeviceMesh, replicate_mesh: DeviceMesh | None) -> None:
        self._axes = (mesh, replicate_mesh)

    @cached_property
    def mesh(self) -> DeviceMesh:
        """Collective when first used."""
        mesh, replicate_mesh = self._axes
        if replicate_mesh is None:
            return mesh
        return common_mesh(mesh, replicate_mesh) or _mesh_of_both(mesh, replicate_mesh)

    @property
    def placements(self) -> list[Shard]:
        return [Shard(0)] * self.mesh.ndim

    def wrap(self, local: torch.Tensor, shape: torch.Size) -> DTensor:
        """A DTensor of `shape` with exactly `local` inside."""
        whole = torch.empty(shape, device="meta")
        wrapped = DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )
        wrapped._local_tensor = local
        return wrapped

    def parameter(self, local: torch.Tensor, shape: torch.Size, requires_grad: bool) -> nn.Parameter:
        """A DTensor whose local rows the runtime may place in its buffers and give gradients (`ParamSpec::sharded`)."""
        parameter = nn.Parameter(self.wrap(local, shape), requires_grad=requires_grad)
        this = weakref.ref(parameter)

        def exchange(rows: torch.Tensor) -> None:
            parameter = this()
            assert parameter is not None
            if rows.grad is None:
                rows.grad = parameter.grad._local_tensor
            else:
                parameter.grad, rows.grad = self.wrap(rows.grad, shape), None

        leaf = local.detach().requires_grad_()
        leaf.register_post_accumulate_grad_hook(exchange)
        parameter._local_tensor = leaf.requires_grad_(False)
        return parameter


def common_mesh(mesh: DeviceMesh, replicate_mesh: DeviceMesh) -> DeviceMesh | None:
    """(replicate, shard) if both are cut from one mesh, as FSDP2 has it."""
    if not (mesh.mesh_dim_names and replicate_mesh.mesh_dim_names):
        return None
    try:
        return mesh._get_root_mesh()[replicate_mesh.mesh_dim_names + mesh.mesh_dim_names]
    except (AttributeError, KeyError, RuntimeError):  # no such root, or its axes are in the other order
        return None


def _mesh_of_both(mesh: DeviceMesh, replicate_mesh: DeviceMesh) -> DeviceMesh:
    """(replicate, shard), of two meshes that were made apart; collective over the replicas."""
    groups = [replicate_mesh.get_group(), mesh.get_group()]
    ranks: list[list[int]] = [[]] * replicate_mesh.size()
    dist.all_gather_object(ranks, dist.get_process_group_ranks(groups[1]), group=groups[0])
    return DeviceMesh.from_group(
        groups, mesh.device_type, mesh=torch.tensor(ranks), mesh_dim_names=("replicate", "shard")
    )


class CutParam(DedicatedParam):
    """One that is cut: every rank owns its rows of it."""

    def __init__(
        self,
        handle: torch.ScriptObject,
        index: int,
        parameter: nn.Parameter,
        name: str,
        part: tuple[int, int],
        mesh: CutMesh,
    ) -> None:
        """handle, index: of this rank's part, or of the first one if it has none.  part: its rows."""
        super().__init__(handle, index, parameter, one_dimensional=True, elementwise=True)
        self.name = name
        self.owner_rank = None
        self.leads = part[0] == 0
        self._part = slice(*part)
        self._mesh = mesh
        self._rows = parameter._local_tensor
        if not self.is_owner:
            self._expect_no_rows()

    def _expect_no_rows(self) -> None:
        this = weakref.ref(self)

        def fill(_: torch.Tensor) -> None:
            param = this()
            if param is not None and param.parameter.grad is None:
                param.parameter.grad = param._mesh.wrap(torch.zeros_like(param._rows), param.parameter.shape)

        first = self._handle.registered().requires_grad_()
        first.register_post_accumulate_grad_hook(fill)
        first.requires_grad_(False)

    @property
    def _owned_data(self) -> torch.Tensor | None:
        return super()._owned_data if self.is_owner else None

    @property
    def _reduced_grad(self) -> torch.Tensor | None:
        return self.parameter.grad

    @property
    def intact(self) -> bool:
        return self.parameter._local_tensor is self._rows

    def bind(self, runtime: torch.ScriptObject, parameter: nn.Parameter) -> None:
        self.parameter, self._rows = parameter, parameter._local_tensor
        if self.is_owner:
            runtime.rebind(self.index, self._rows)
        runtime.reshow(self.index, parameter)

    @torch.no_grad()
    def applied(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> nn.Parameter | None:
        """The parameter after a module's `_apply(fn)`; None if that changes nothing."""
        before = self.parameter
        local = fn(self._rows)
        if (local.data_ptr(), local.device) == (self._rows.data_ptr(), self._rows.device):
            return None
        after = self._mesh.parameter(local, before.shape, before.requires_grad)
        if before.grad is not None:
            after.grad = self._mesh.wrap(fn(before.grad._local_tensor), before.shape)
        return after

    def wrap(self, owned: torch.Tensor) -> DTensor:
        """The parameter, or this rank's rows of something that belongs to it, as a DTensor."""
        return owned if isinstance(owned, DTensor) else self._mesh.wrap(owned, self.parameter.shape)

    def load(self, value: torch.Tensor, owned: torch.Tensor) -> None:
        """`owned` takes the values of a DTensor or of a tensor that is whole on every rank."""
        owned = self.wrap(owned)
        like = isinstance(value, DTensor) and value.device_mesh == owned.device_mesh
        if like and value.placements == owned.placements:
            local = value._local_tensor
        else:
            whole = value.to(value.device_mesh.device_type).full_tensor() if isinstance(value, DTensor) else value
            local = whole[self._part]
        owned._local_tensor.copy_(local)


@contextlib.contextmanager
def local_rows(parameters: Iterable[nn.Parameter]) -> Iterator[dict[nn.Parameter, torch.Tensor]]:
    """Of those that are cut and have a gradient, this rank's rows, with gradients of their own inside: for torch's
    optimizers, whose foreach kernels do not mix DTensors with others.
    """
    cut = [p for p in parameters if is_cut(p) and p.grad is not None]
    rows = {p: p._local_tensor for p in cut}
    try:
        for p, local in rows.items():
            local.grad = p.grad._local_tensor
        yield rows
    finally:
        for local in rows.values():
            local.grad = None
