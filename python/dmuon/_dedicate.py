"""dedicate_params: gives every selected parameter to one owner rank."""

import weakref

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from ._assignment import Assignment
from ._checkpoint import Rows, attach_state_dict
from ._cut import CutMesh, PlanRows
from ._fsdp2 import share_controls
from ._guards import forbid_copies, guard_apply
from ._handles import DedicatedParam, DedicatedParamGroup, Dedication, attach, is_sharded, mark_dedicated
from ._hooks import GroupHooks, Hooks, RootHooks, attach_hooks
from ._parameters import Parameters
from ._select import (
    Boundary,
    BoundaryPredicate,
    Matrix,
    Predicate,
    check_dtypes,
    group_by_boundary,
    names_inside,
    select,
)


def dedicate_params(  # noqa: PLR0913 (the public signature)
    model: nn.Module,
    mesh: DeviceMesh,
    predicate: Predicate,
    *,
    replicate_mesh: DeviceMesh | None = None,
    reshard_after_forward: bool = True,
    mp_policy: MixedPrecisionPolicy | None = None,
    compute_dtype: torch.dtype | None = None,
    hook_boundary_predicate: BoundaryPredicate | None = None,
    hook_boundary_strict: bool = True,
    owner_strategy: str = "lpt",
    reproducible: bool = False,
    elementwise: Predicate | None = None,
    comm: str = "auto",
) -> Assignment:
    """Dedicates the parameters for which `predicate(name, parameter)` is true.  Collective over `mesh`.

    Afterwards `model.parameters()` gives, for each of them, the fp32 master on its owner and a meta tensor of the same
    shape elsewhere; after backward the owner's has `.grad`, the mean over the ranks.  Parameters and buffers that are
    not sharded yet take rank 0's values.  Call it before `fully_shard`, which then skips the dedicated parameters.

    mesh: 1-D, the ranks that share the data-parallel work.
    replicate_mesh: 1-D, for HSDP: the ranks with this rank's shard coordinate, one per replica.  Owners are then
        spread over both axes; gathers stay inside `mesh`, gradients are summed there first and then across replicas,
        and after a step the owner sends new weights to its replicas.
    reshard_after_forward: True frees gathered weights after forward and gathers them again in backward (Z3); False
        keeps them until backward (Z2).
    mp_policy: FSDP2's policy.  param_dtype: what is sent and computed with; reduce_dtype: what gradients are summed in;
        cast_forward_inputs, output_dtype: as in FSDP2, at the hook modules.  compute_dtype is short for param_dtype.
    hook_boundary_predicate: picks, for each parameter, the lowest module around it (itself included) that triggers
        communication; if none is found, an error, or with hook_boundary_strict=False the module itself.  Default:
        `layers.N` and `blocks.N`, then entries of module lists, then the module itself; the root for small elementwise
        parameters outside of these.
    elementwise: of the parameters that `predicate` leaves, those for which it is true are dedicated too: of any shape,
        stepped by AdamW.  From 2^22 elements on one is cut by rows over all ranks and becomes a DTensor; smaller ones
        have one owner.  `lambda name, p: True` takes all that are left: then fully_shard is not needed.
    owner_strategy: "lpt" (balanced by predicted optimizer time), "round_robin" or "rank0".
    reproducible: gradients of all of them are summed in a fixed binary tree over micro-batches and global ranks,
        so that 1x4, 2x2 and 4x1 meshes, and one rank with four micro-batches, give the same bits.  Owners receive every
        rank's gradient and add them themselves: slower, more memory.  With replicas the shard axis must have a power of
        two of ranks.
    comm: who moves the bytes inside `mesh`.  "nccl": the process group's backend.  "peer": copy engines read the
        peers' memory and owners add up gradients themselves, which leaves the GPU's processors to the model and sends
        gradients in their own dtype; needs CUDA, all ranks of `mesh` on one host, and peer access between their GPUs.
        "auto": "peer" where it works (all ranks decide together), else "nccl".

    Returns the read-only assignment of parameters to owners.
    Raises ValueError on every rank, with the parameter's name, before anything is changed: no match, a match that is
    not 2-D (elementwise: 0-D) or not floating, a parameter dedicated or sharded already, tied parameters of which only
    some are matrices, a boundary not found, ranks that disagree.
    """
    _check_meshes(mesh, replicate_mesh, comm)
    policy = _policy(mp_policy, compute_dtype)
    device = _device(mesh)
    gather = _communicator(mesh, "gather", device, comm=comm)
    replicate = None if replicate_mesh is None else _communicator(replicate_mesh, "replicate", device, reproducible)
    boundary = Boundary(hook_boundary_predicate, hook_boundary_strict)
    matrices, groups = _agree(gather, replicate, (model, predicate, elementwise, boundary), policy.param_dtype)
    shape, slot = zip((mesh.size(), gather.rank()), _size_and_rank(replicate), strict=True)
    rows = PlanRows([matrix.plan_input for matrix in matrices], *shape)
    plan = rows.plan(owner_strategy)

    of_sums = _comm_of_sums(comm, reproducible, policy, matrices)
    _take_first_ranks_values([gather, replicate], model, device)
    reduce = _communicator(mesh, "reduce", device, reproducible, of_sums)
    flags = (policy.cast_forward_inputs, reshard_after_forward, reproducible)
    options = ((policy.param_dtype, policy.reduce_dtype), flags)
    comms = (gather, reduce, replicate)
    owned = [tuple(owner) == slot for owner in plan.owners()]
    parameters = Parameters(rows, owned, CutMesh(mesh, replicate_mesh), matrices, (policy.param_dtype, device))
    runtime = torch.classes.dmuon.Runtime(plan, parameters.of_plan, rows.members(groups), comms, device, options)
    params, handles = _make_handles(runtime, parameters, groups, replicate_mesh is None)
    axes = _process_groups(mesh, replicate_mesh)
    dedication = Dedication(runtime, plan, comms, axes, params, handles, parameters.unsharded)
    dedication.rows = Rows(dedication, mesh, replicate_mesh)
    _install(model, dedication, matrices, [boundary.modules[name] for name, _ in groups], policy.output_dtype)
    if not any(m.parameter.is_meta for m in matrices):
        runtime.materialize()
    return Assignment(params, plan)


_COMMS = ("auto", "nccl", "peer")
_PEER_SUMS = (torch.float32, torch.bfloat16, torch.float16)


def _comm_of_sums(comm: str, reproducible: bool, policy: MixedPrecisionPolicy, matrices: list[Matrix]) -> str:
    if reproducible:
        return "nccl"
    dtype = policy.reduce_dtype or policy.param_dtype or matrices[0].parameter.dtype
    if dtype in _PEER_SUMS:
        return comm
    if comm == "peer":
        raise ValueError(f'[dmuon.dedicate_params] comm="peer" adds up {_PEER_SUMS}, not the reduce dtype {dtype}')
    return "nccl"


def _check_meshes(mesh: DeviceMesh, replicate_mesh: DeviceMesh | None, comm: str) -> None:
    for name, axis in (("mesh", mesh), ("replicate_mesh", replicate_mesh)):
        if axis is not None and axis.ndim != 1:
            raise ValueError(
                f"[dmuon.dedicate_params] {name} must be 1-D, got {axis.ndim}-D {axis}; of a 2-D mesh pass "
                "mesh['shard'] and replicate_mesh=mesh['replicate']"
            )
    if comm not in _COMMS:
        raise ValueError(f"[dmuon.dedicate_params] comm must be one of {_COMMS}, got {comm!r}")


def _process_groups(*axes: DeviceMesh | None) -> list[dist.ProcessGroup]:
    return [axis.get_group() for axis in axes if axis is not None]


class _Groups(dict):
    """Of a mesh; a copy of the mesh, as torch's async_save makes, has none."""

    def __reduce__(self) -> tuple:
        return _Groups, ()


def _communicator(
    axis: DeviceMesh, purpose: str, device: torch.device, reproducible: bool = False, comm: str = "nccl"
) -> torch.ScriptObject:
    """Over a process group of its own, one per mesh object and purpose: its collectives neither queue behind FSDP2's or
    each other's nor depend on their order.
    """
    groups = axis.__dict__.setdefault("_dmuon_groups", _Groups())
    if purpose not in groups:
        ranks = dist.get_process_group_ranks(axis.get_group())
        _even_out_groups(axis.get_group())
        groups[purpose] = dist.new_group(ranks, use_local_synchronization=True, group_desc=f"dmuon_{purpose}")
    if comm != "nccl" and device.type == "cuda":
        torch.cuda.empty_cache()  # shared memory is taken from the device itself
    choice = (groups[purpose].group_name, axis.get_group().group_name, comm, purpose == "reduce")
    return torch.classes.dmuon.Communicator(choice, device, reproducible)


def _even_out_groups(group: dist.ProcessGroup) -> None:
    """Makes the ranks members of equally many groups.  torch puts that number into the name of a group that only its
    members make; with different numbers they would wait for each other for ever.
    """
    mine = len(dist.distributed_c10d._world.pg_names)
    numbers: list[int] = [mine] * group.size()
    dist.all_gather_object(numbers, mine, group=group)
    for _ in range(max(numbers) - mine):
        backend = "gloo" if dist.is_gloo_available() else None
        dist.new_group([dist.get_rank()], use_local_synchronization=True, backend=backend, group_desc="dmuon_of_one")


def _policy(mp_policy: MixedPrecisionPolicy | None, compute_dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    if compute_dtype is None:
        return mp_policy or MixedPrecisionPolicy(cast_forward_inputs=False)
    if mp_policy is not None:
        raise ValueError("[dmuon.dedicate_params] pass mp_policy or compute_dtype, not both")
    return MixedPrecisionPolicy(param_dtype=compute_dtype)


def _device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def _agree(
    gather: torch.ScriptObject,
    replicate: torch.ScriptObject | None,
    selection: tuple[nn.Module, Predicate, Predicate | None, Boundary],
    param_dtype: torch.dtype | None,
) -> tuple[list[Matrix], list[tuple[str, list[int]]]]:
    """Selects on this rank; then all ranks succeed, or all raise the same error."""
    matrices: list[Matrix] = []
    groups: list[tuple[str, list[int]]] = []
    cause: Exception | None = None
    try:
        matrices = select(*selection)
        groups = group_by_boundary(matrices, selection[-1].modules)
        check_dtypes(matrices, param_dtype)
    except Exception as error:
        cause = error
    message = "" if cause is None else str(cause) if isinstance(cause, ValueError) else repr(cause)
    try:
        gather.agree(replicate, message, "\n".join(matrix.describe() for matrix in matrices))
    except (ValueError, RuntimeError) as error:
        raise ValueError(str(error)) from cause
    return matrices, groups


def _take_first_ranks_values(comms: list[torch.ScriptObject | None], model: nn.Module, device: torch.device) -> None:
    """Different seeds per rank must not train different models."""
    tensors = {id(t): t for t in [*model.parameters(), *model.buffers()] if not is_sharded(t) and not t.is_meta}
    for comm in (comm for comm in comms if comm is not None):
        comm.broadcast_from_first([t.detach() for t in tensors.values()], device)
        comm.reset_stats()


def _size_and_rank(replicate: torch.ScriptObject | None) -> tuple[int, int]:
    return (1, 0) if replicate is None else (replicate.size(), replicate.rank())


def _make_handles(
    runtime: torch.ScriptObject, parameters: Parameters, groups: list[tuple[str, list[int]]], one_dimensional: bool
) -> tuple[list[DedicatedParam], list[DedicatedParamGroup]]:
    params = parameters.handles(runtime, one_dimensional)
    by_index = [[params[i] for i in members] for _, members in groups]
    return params, [DedicatedParamGroup(h, m) for h, m in zip(runtime.groups(), by_index, strict=True)]


def _install(
    model: nn.Module,
    dedication: Dedication,
    matrices: list[Matrix],
    hook_modules: list[nn.Module],
    output_dtype: torch.dtype | None,
) -> None:
    """Registers parameters and hooks; from here on the model is dedicated."""
    by_module: dict[nn.Module, list] = {}
    for index, matrix in enumerate(matrices):
        mark_dedicated(dedication.params[index])
        for site in matrix.sites:
            site.index = index
            site.module._parameters[site.attribute] = dedication.params[index].parameter
            by_module.setdefault(site.module, []).append(site)
            dedication.sites.append(site)
    enclosing = names_inside(matrices)
    for name, module in model.named_modules():
        if name in enclosing:
            guard_apply(module, dedication, by_module.get(module, []), enclosing[name])
            forbid_copies(module)
    root = RootHooks(dedication, model)
    dedication.root_hooks = weakref.ref(root)
    hooks: dict[nn.Module, list[Hooks]] = {model: [root]}
    for index, module in enumerate(hook_modules):
        members = {id(param) for param in dedication.groups[index].params}
        sites = [site for site in dedication.sites if id(dedication.params[site.index]) in members]
        root.groups.append(GroupHooks(dedication, index, sites, output_dtype))
        hooks.setdefault(module, []).append(root.groups[-1])
    for module, of_module in hooks.items():
        attach_hooks(module, of_module)
    share_controls(model, hook_modules, dedication)
    attach_state_dict(model, dedication, by_module)
    attach(model, dedication)
