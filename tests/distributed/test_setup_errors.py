"""Bad input is a clear error with the parameter's name, at set-up, with nothing half-done; on every rank."""

import copy

import pytest
import torch
import torch.nn as nn
from reference import TinyModel, batch, is_matrix, loss_of
from setup import Setup
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon

pytestmark = pytest.mark.ranks(1, 2)


def fails(mesh, predicate, match: str, bad: nn.Module | None = None, error=ValueError, **kwargs) -> None:
    """The call fails on every rank, the model is untouched, and (unless the model is bad) the right call works then."""
    model = bad or TinyModel()
    before = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}
    with pytest.raises(error, match=match):
        dmuon.dedicate_params(model, mesh, predicate, **kwargs)
    for name, parameter in model.named_parameters():
        assert id(parameter) == before[name][0] and torch.equal(parameter, before[name][1])
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert dmuon.get_dedicated_params(model) == []
    if bad is None:
        dmuon.dedicate_params(model, mesh, is_matrix)


def test_no_match(mesh):
    fails(mesh, lambda n, p: False, "no parameter satisfies the predicate")


def test_predicate_that_differs_between_ranks(mesh, rank, world_size):
    if world_size == 1:
        pytest.skip("needs two ranks to differ")
    fails(mesh, lambda n, p: is_matrix(n, p) and (rank == 0 or "layers.1" not in n), r"layers\.1\.mix\.weight")


def test_predicate_that_matches_on_one_rank_only(mesh, rank, world_size):
    if world_size == 1:
        pytest.skip("needs two ranks to differ")
    fails(mesh, lambda n, p: is_matrix(n, p) and rank == 0, "rank 1: no parameter satisfies")


def test_predicate_that_raises_on_one_rank(mesh, rank, world_size):
    def predicate(name, parameter):
        if rank == world_size - 1:
            raise KeyError("user bug")
        return is_matrix(name, parameter)

    fails(mesh, predicate, f"rank {world_size - 1}: KeyError.*user bug")


def test_not_a_matrix(mesh):
    fails(mesh, lambda n, p: "norm" in n, r"'layers\.0\.norm\.weight' has shape \(24,\)")


def test_not_floating(mesh):
    model = TinyModel()
    model.layers[0].counts = nn.Parameter(torch.zeros(4, 4, dtype=torch.int64), requires_grad=False)
    fails(mesh, lambda n, p: "counts" in n, r"'layers\.0\.counts' has dtype torch\.int64", model)


def test_dedicated_twice(mesh):
    model = TinyModel()
    dmuon.dedicate_params(model, mesh, is_matrix)
    with pytest.raises(ValueError, match=r"'layers\.0\.mix\.weight' is dedicated already"):
        dmuon.dedicate_params(model, mesh, is_matrix)


def test_after_fully_shard(mesh):
    model = TinyModel()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    with pytest.raises(ValueError, match=r"'layers\.0\.mix\.weight' is a DTensor.*before fully_shard"):
        dmuon.dedicate_params(model, mesh, is_matrix)


def test_boundary_not_found(mesh):
    never = {"hook_boundary_predicate": lambda module: False}
    fails(mesh, is_matrix, "no ancestor of module 'layers.0.mix'", **never)
    model = TinyModel()
    dmuon.dedicate_params(model, mesh, is_matrix, hook_boundary_strict=False, **never)
    assert model._dmuon.groups[0].name == "layers.0.mix"


def test_unknown_names(mesh):
    fails(mesh, is_matrix, "lpt.*round_robin.*rank0", owner_strategy="best")
    fails(mesh, is_matrix, "unexpected keyword", error=TypeError, owner_stratgy="lpt")
    model, _, _ = Setup().build(mesh)
    with pytest.raises(ValueError, match="'gram', 'gram_accurate' or 'standard'"):
        dmuon.Muon(model, ns_backend="quick")
    with pytest.raises(ValueError, match="'polar_express', 'you' or 'keller_jordan'"):
        dmuon.Muon(model, ns_coefficients="mine")
    with pytest.raises(ValueError, match="original.*match_rms_adamw"):
        dmuon.Muon(model, adjust_lr_fn="none")


def test_mesh_that_is_not_one_dimensional(world_size):
    mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("replicate", "shard"))
    fails_before_agreeing = pytest.raises(ValueError, match="mesh must be 1-D, got 2-D")
    with fails_before_agreeing:
        dmuon.dedicate_params(TinyModel(), mesh, is_matrix)


def test_mixed_dtypes_in_one_group(mesh):
    model = TinyModel()
    model.layers[1].mix.to(torch.bfloat16)
    fails(mesh, is_matrix, r"hook module 'layers\.1' have dtypes", model)


def test_muon_without_dedication():
    with pytest.raises(ValueError, match="Call dedicate_params"):
        dmuon.Muon(TinyModel())


def test_muon_with_a_parameter_nobody_manages(mesh, world_size):
    if world_size == 1:
        pytest.skip("one rank has nobody to differ from")
    model = TinyModel()
    dmuon.dedicate_params(model, mesh, is_matrix)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    with pytest.raises(ValueError, match="'embedding.weight' is neither dedicated nor sharded"):
        dmuon.Muon(model)


def test_muon_with_parameters_of_another_model(mesh):
    model, _, _ = Setup().build(mesh)
    other = TinyModel()
    with pytest.raises(ValueError, match="not one of the model's"):
        dmuon.Muon(model, param_groups=[{"params": list(other.parameters())}])


def test_muon_parameter_groups(mesh):
    model, _, _ = Setup().build(mesh)
    everything = list(model.parameters())
    with pytest.raises(ValueError, match=r"unknown keys \['beta'\]"):
        dmuon.Muon(model, param_groups=[{"params": everything, "beta": 0.9}])
    with pytest.raises(ValueError, match="'embedding.weight' is in param_groups more than once"):
        dmuon.Muon(model, param_groups=[{"params": everything}, {"params": everything[:1]}])
    with pytest.raises(ValueError, match="leave out trainable parameters: embedding.weight"):
        dmuon.Muon(model, param_groups=[{"params": everything[1:]}])


@pytest.mark.parametrize(
    "wrong",
    [
        {"lr": -1.0},
        {"momentum": -0.1},
        {"momentum": 1.0},
        {"weight_decay": -0.1},
        {"adamw_lr": -1.0},
        {"lr": float("nan")},
    ],
)
def test_muon_values_out_of_range(mesh, wrong):
    model, _, _ = Setup().build(mesh)
    with pytest.raises(ValueError, match=next(iter(wrong))):
        dmuon.Muon(model, **wrong)
    with pytest.raises(ValueError, match="adamw_betas"):
        dmuon.Muon(model, adamw_betas=(0.9, 1.0))


def test_unknown_torch_signature_names_the_way_without_the_patch(monkeypatch):
    from torch.distributed.fsdp._fully_shard import _fsdp_init

    dmuon.uninstall_patch()
    monkeypatch.setattr(_fsdp_init, "_get_managed_states", lambda modules, other: None)
    with pytest.raises(RuntimeError, match="ignored_params=set"):
        dmuon.install_patch()
    monkeypatch.undo()
    dmuon.install_patch()
    dmuon.install_patch()
    dmuon.uninstall_patch()
    assert not hasattr(_fsdp_init._get_managed_states, "_dmuon_original")
    dmuon.install_patch()


def test_errors_leave_a_model_that_trains(mesh, rank):
    """After failed calls, the same model still trains as if nothing had happened."""
    torch.manual_seed(0)
    model = TinyModel()
    untouched = copy.deepcopy(model)
    for predicate in (lambda n, p: False, lambda n, p: "norm" in n):
        with pytest.raises(ValueError):
            dmuon.dedicate_params(model, mesh, predicate)
    assert torch.equal(loss_of(model, batch(0, rank)), loss_of(untouched, batch(0, rank)))
