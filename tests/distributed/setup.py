"""Builds the same model twice: dedicated and sharded over the mesh, and plain for the reference."""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
from reference import MuonSettings, Reference, TinyModel, is_matrix, relative_error
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import dmuon
from dmuon import _cut


@dataclass
class Setup:
    """How the dedicated model is wrapped."""

    z3: bool = True
    dtype: torch.dtype | None = None
    recipe: str = "a"
    """"a": fully_shard on every layer and the root; "b": on the root only; "free": a, without the patch; "c": nowhere,
    the other parameters are dedicated too."""
    settings: MuonSettings = field(default_factory=MuonSettings)
    make: Callable[[], nn.Module] = TinyModel
    replicate_async: bool = True
    comm: str | None = None
    """None: as the launch says (--comm)."""
    cut_elements: int = 200
    """In recipe c, from how many on an elementwise parameter is cut by rows."""
    predicate: Callable[[str, nn.Parameter], bool] = is_matrix
    layers: Callable[[nn.Module], Iterable[nn.Module]] = lambda model: model.layers
    """What recipe a wraps besides the root."""

    @property
    def policy(self) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)

    def wrap(self, model: nn.Module, mesh: DeviceMesh) -> dmuon.Assignment:
        policy = self.policy if self.dtype else None
        hsdp = mesh.ndim == 2
        with mock.patch.object(_cut, "LEAST_ELEMENTS", self.cut_elements):
            assignment = dmuon.dedicate_params(
                model,
                mesh.axes["shard"] if hsdp else mesh,
                self.predicate,
                replicate_mesh=mesh.axes["replicate"] if hsdp else None,
                reshard_after_forward=self.z3,
                mp_policy=policy,
                elementwise=(lambda name, p: True) if self.recipe == "c" else None,
                **({} if self.comm is None else {"comm": self.comm}),
            )
        if self.recipe == "c":
            return assignment
        kwargs = {"mesh": mesh, "reshard_after_forward": self.z3, "mp_policy": self.policy}
        if self.recipe == "free":
            dmuon.uninstall_patch()
            kwargs["ignored_params"] = set(assignment)
        if self.recipe != "b":
            for layer in self.layers(model):
                fully_shard(layer, **kwargs)
        fully_shard(model, **kwargs)
        dmuon.install_patch()
        return assignment

    def build(self, mesh: DeviceMesh) -> tuple[nn.Module, dmuon.Muon, Reference]:
        torch.manual_seed(0)
        model = self.make()
        reference = Reference(copy.deepcopy(model).to(mesh.device_type), self.settings, self.dtype, self.predicate)
        self.wrap(model, mesh)
        s = self.settings
        optimizer = dmuon.Muon(
            model,
            lr=s.lr,
            momentum=s.momentum,
            weight_decay=s.weight_decay,
            nesterov=s.nesterov,
            adamw_lr=s.adamw_lr,
            replicate_async=self.replicate_async,
        )
        return model, optimizer, reference


def check_invariants(model: nn.Module) -> None:
    dmuon.check_invariants(model)
    shard = model._dmuon.comms[0].rank()
    for param in dmuon.get_dedicated_params(model):
        if param.owner_rank is None:  # every rank owns its rows
            rows = param.parameter.to_local().shape[0]
            assert param.is_owner == (rows > 0) == (param._owned_data is not None), f"I1, I2: {param}"
            continue
        column = param.owner_rank if isinstance(param.owner_rank, int) else param.owner_rank[0]
        assert param.is_owner == (not param.parameter.is_meta), f"I1: {param}"
        assert (param._owned_data is not None) == (column == shard), f"I2: {param}"
        assert param.is_owner or param._reduced_grad is None, f"I3: {param}"


def add_rows_of_others(tensors: dict[str, torch.Tensor], cut: list[str], group: dist.ProcessGroup) -> None:
    """The tensors named in `cut` become the rows of every rank, one after another.  Exchanged as objects, because gloo
    gathers no CUDA tensors.
    """
    parts: list[dict[str, torch.Tensor]] = [{}] * dist.get_world_size(group)
    # clone(): a view would be sent with all that it looks into.
    dist.all_gather_object(parts, {name: tensors[name].cpu().clone() for name in cut}, group=group)
    for name in cut:
        tensors[name] = torch.cat([part[name] for part in parts]).to(tensors[name].device)


def gathered_all(tensors: dict[str, DTensor]) -> dict[str, torch.Tensor]:
    """As full_tensor() of each, in one exchange for each axis of a mesh: a collective a tensor takes milliseconds."""
    whole = {name: tensor.to_local().detach() for name, tensor in tensors.items()}
    for mesh in dict.fromkeys(tensor.device_mesh for tensor in tensors.values()):
        for axis in reversed(range(mesh.ndim)):
            placements = {name: t.placements[axis] for name, t in tensors.items() if t.device_mesh == mesh}
            cut = [name for name, placement in placements.items() if not placement.is_replicate()]
            assert all(placements[name].is_shard(0) for name in cut), placements
            if cut:
                add_rows_of_others(whole, cut, mesh.get_group(axis))
    for name, tensor in tensors.items():
        assert whole[name].shape == tensor.shape, f"{name}: {whole[name].shape} of {tensor.shape}"
    return whole


def gathered(tensor: DTensor) -> torch.Tensor:
    return gathered_all({"": tensor})[""]


def full_values(model: nn.Module, grads: bool = False) -> dict[str, torch.Tensor | None]:
    """What this rank can know in full: its own matrices, and all FSDP2 parameters."""
    values: dict[str, torch.Tensor | None] = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) or not parameter.is_meta:
            tensor = parameter.grad if grads else parameter
            values[name] = tensor.detach() if tensor is not None else None
    return values | gathered_all({name: value for name, value in values.items() if isinstance(value, DTensor)})


def mesh_of(model: nn.Module) -> tuple[int, int]:
    """(shard, replicate) sizes."""
    gather, _, replicate = model._dmuon.comms
    return gather.size(), 1 if replicate is None else replicate.size()


def global_rank(mesh: tuple[int, int], owner: int | tuple[int, int]) -> int:
    """Of an owner, in a mesh whose last axis is the shard axis."""
    shard, replicate = (owner, 0) if isinstance(owner, int) else owner
    return replicate * mesh[0] + shard


def align(model: nn.Module, reference: Reference) -> None:
    """Gives the reference the model's present values, so that low-precision rounding cannot drift apart over steps."""
    values = full_values(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    owners = {names[param.parameter]: param.owner_rank for param in dmuon.get_dedicated_params(model)}
    owners = {name: global_rank(mesh_of(model), owner) for name, owner in owners.items() if owner is not None}
    mine = {name: values[name].cpu() for name, owner in owners.items() if owner == dist.get_rank()}
    everyones: list[dict[str, torch.Tensor]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    values |= {name: everyones[owner][name] for name, owner in owners.items()}
    with torch.no_grad():
        for name, target in reference.model.named_parameters():
            target.copy_(values[name])


def update_tolerance(mesh: DeviceMesh, tolerance: float = 1e-6) -> float:
    """On CUDA Newton-Schulz runs in fp16: 2e-2 of an update that changes a weight by a few per cent."""
    return tolerance if mesh.device_type == "cpu" else 1e-3


def assert_same(model: nn.Module, reference: Reference, tolerance: float = 1e-6, grads: bool = False) -> None:
    expected = dict(reference.model.named_parameters())
    for name, value in full_values(model, grads).items():
        wanted = expected[name].grad if grads else expected[name].detach()
        if wanted is None or value is None:
            assert wanted is None and value is None, f"{name}: got {value}, expected {wanted}"
            continue
        error = relative_error(value, wanted)
        assert error <= tolerance, f"{name}: relative error {error:.2e} > {tolerance:.0e}"


def step_both(mesh: DeviceMesh, model: nn.Module, optimizer: dmuon.Muon, reference: Reference) -> None:
    """Gradients agree, then weights after the step."""
    assert_same(model, reference, tolerance=1e-5, grads=True)
    optimizer.step()
    reference.step()
    optimizer.zero_grad()
    reference.zero_grad()
    assert_same(model, reference, update_tolerance(mesh, 2e-6))
    if mesh.device_type != "cpu":
        align(model, reference)
