"""Every option changes something that can be observed; none is accepted and ignored."""

import pytest
import torch
from reference import TinyModel, batch, is_matrix, loss_of
from setup import full_values
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import dmuon

pytestmark = pytest.mark.ranks(1, 2)


def build(mesh, sharded: bool = True, **options) -> TinyModel:
    torch.manual_seed(0)
    model = TinyModel(dim=16, hidden=24, layers=3)
    dmuon.dedicate_params(model, mesh, is_matrix, **options)
    if sharded:
        fully_shard(model, mesh=mesh)
    return model.to(mesh.device_type)


def train(model, rank: int, **options) -> dict[str, torch.Tensor]:
    optimizer = dmuon.Muon(model, **({"lr": 0.01, "weight_decay": 0.1} | options))
    for step in range(2):
        loss_of(model, batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in full_values(model).items()}


MUON = {
    "lr": 0.02, "momentum": 0.5, "weight_decay": 0.3, "nesterov": False, "ns_backend": "standard",
    "ns_steps": 3, "ns_coefficients": "keller_jordan", "adjust_lr_fn": "original",
}  # fmt: skip
ADAMW = {"adamw_lr": 1e-2, "adamw_betas": (0.5, 0.6), "adamw_weight_decay": 0.5, "adamw_eps": 1e-1}


@pytest.mark.parametrize("option", [*MUON, *ADAMW])
def test_optimizer_options(mesh, rank, option):
    """Matrices move with Muon's options, the rest with AdamW's."""
    base = train(build(mesh), rank)
    changed = train(build(mesh), rank, **{option: (MUON | ADAMW)[option]})
    matrices = {param.name for param in dmuon.get_dedicated_params(build(mesh)) if param.is_owner}
    moved = {name for name, value in base.items() if not torch.equal(value, changed[name])}
    if option in MUON and matrices:
        assert moved & matrices
    if option in ADAMW:
        assert moved - matrices


def test_param_groups(mesh, rank):
    base = train(build(mesh), rank)
    model = build(mesh)
    first = [p for n, p in model.named_parameters() if "layers.0" in n]
    rest = [p for n, p in model.named_parameters() if "layers.0" not in n]
    changed = train(model, rank, param_groups=[{"params": first, "muon_lr": 0.05}, {"params": rest}])
    moved = {name for name, value in base.items() if not torch.equal(value, changed[name])}
    owned = {p.name for p in dmuon.get_dedicated_params(model) if p.is_owner}
    assert {name for name in owned if "layers.0" in name} <= moved


def groups_of(model) -> list[str]:
    return [group.name for group in model._dmuon.groups]


def test_reshard_after_forward(mesh, rank, world_size):
    calls = {}
    for reshard in (True, False):
        model = build(mesh, reshard_after_forward=reshard)
        dmuon.comm_stats(model, reset=True)
        loss_of(model, batch(0, rank)).backward()
        calls[reshard] = dmuon.comm_stats(model).broadcast_calls
    assert calls == ({True: 6, False: 3} if world_size > 1 else {True: 0, False: 0})


@pytest.mark.parametrize("short", [True, False], ids=["compute_dtype", "mp_policy"])
def test_param_dtype(mesh, short):
    dtype = torch.bfloat16
    options = {"compute_dtype": dtype} if short else {"mp_policy": MixedPrecisionPolicy(param_dtype=dtype)}
    model = build(mesh, **options)
    assert {leaf.dtype for leaf in model._dmuon.unsharded} == {dtype}
    assert {p.parameter.dtype for p in dmuon.get_dedicated_params(model)} == {torch.float32}


def test_reduce_dtype(mesh, rank, world_size):
    sent = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = build(mesh, False, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=dtype))
        dmuon.comm_stats(model, reset=True)
        with torch.autocast(mesh.device_type, torch.bfloat16):
            model.layers[0](torch.ones(1, 16, device=mesh.device_type)).sum().backward()
        sent[dtype] = dmuon.comm_stats(model).reduce_bytes
    assert sent[torch.float32] == 2 * sent[torch.bfloat16]


def test_input_and_output_dtypes(mesh, rank):
    seen: list[torch.dtype] = []

    def dtypes(**policy) -> tuple[torch.dtype, torch.dtype]:
        model = torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False)).to(mesh.device_type)
        dmuon.dedicate_params(model, mesh, lambda n, p: True, mp_policy=MixedPrecisionPolicy(**policy))
        model[0].forward = lambda x: seen.append(x.dtype) or x.to(model[0].weight.dtype) @ model[0].weight
        return model(torch.ones(1, 16, device=mesh.device_type)).dtype, seen.pop()

    bf16, fp32 = torch.bfloat16, torch.float32
    assert dtypes(param_dtype=bf16, cast_forward_inputs=True) == (bf16, bf16)
    assert dtypes(param_dtype=bf16, cast_forward_inputs=False) == (bf16, fp32)
    assert dtypes(param_dtype=bf16, output_dtype=fp32) == (fp32, bf16)


def test_hook_boundaries(mesh):
    assert groups_of(build(mesh)) == ["layers.0", "layers.1", "layers.2"]
    linear = build(mesh, hook_boundary_predicate=lambda m: isinstance(m, torch.nn.Linear))
    assert len(groups_of(linear)) == 9
    with pytest.raises(ValueError, match="no ancestor"):
        build(mesh, hook_boundary_predicate=lambda m: False)
    assert len(groups_of(build(mesh, hook_boundary_predicate=lambda m: False, hook_boundary_strict=False))) == 9


def test_owner_strategy(mesh, world_size):
    owners = {s: list(build(mesh, owner_strategy=s)._dmuon.plan.owners()) for s in ("lpt", "round_robin", "rank0")}
    assert {shard for shard, _ in owners["rank0"]} == {0}
    if world_size > 1:
        assert owners["lpt"] != owners["rank0"] != owners["round_robin"]


def test_reproducible(mesh, rank, world_size):
    """Other bits where more than two addends can be added in another order."""
    results = []
    for reproducible in (True, False):
        model = build(mesh, reproducible=reproducible)
        for step in range(4):  # the tree adds the third and the fourth first
            loss_of(model, batch(step, rank)).backward()
        results.append({p.name: p._reduced_grad for p in dmuon.get_dedicated_params(model) if p.is_owner})
    if results[0] and world_size > 1:
        assert any(not torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_replicate_async(hsdp_mesh, rank):
    """False: nothing is in flight after the step.  True: something is, until the next use."""

    def pending_after_step(replicate_async: bool) -> bool:
        axes = hsdp_mesh.axes
        model = TinyModel(dim=16, hidden=24, layers=2)
        dmuon.dedicate_params(model, axes["shard"], is_matrix, replicate_mesh=axes["replicate"])
        fully_shard(model, mesh=hsdp_mesh)
        optimizer = dmuon.Muon(model, replicate_async=replicate_async)
        loss_of(model, batch(0, rank)).backward()
        optimizer.step()
        return "(publishing)" in dmuon.describe_progress(model)

    assert not pending_after_step(False)
    assert pending_after_step(True)


def test_the_optimizer_reports_its_workspace(mesh):
    """Of this rank's own matrices; where nothing is planned, that is said."""
    optimizer = dmuon.Muon(build(mesh))
    taken = optimizer.workspace_bytes()
    if mesh.device_type == "cpu" or torch.cuda.get_device_capability() != (9, 0):
        assert taken is None
    else:
        largest = max(p.numel() for p in optimizer.param_groups[0]["params"] if not p.is_meta)
        assert 4 * largest <= taken < 1 << 31
