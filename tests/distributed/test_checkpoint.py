"""Torch's own checkpoint functions on a dedicated model: what is in a state dict, and resuming with the same bits."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import OddModel, Run, assert_equal
from setup import Setup, check_invariants
from torch.distributed.checkpoint.state_dict import set_state_dict

import dmuon


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("z3", [True, False], ids=["z3", "z2"])
def test_resume_has_the_same_bits(mesh_2d, folder, z3, dtype):
    """DCP with torch's functions only; the new run begins with other values and has made other steps."""
    setup = Setup(z3=z3, dtype=dtype, make=OddModel)
    run = Run(mesh_2d, setup=setup).train(range(2))
    dcp.save(run.state(), checkpoint_id=folder / "a")
    saved = run.values()
    final = run.train(range(2, 5)).values()

    other = Run(mesh_2d, seed=1, setup=setup, lr=0.3, adamw_lr=0.7).train(range(7, 8))
    state = other.state()
    dcp.load(state, checkpoint_id=folder / "a")
    set_state_dict(other.model, other.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    check_invariants(other.model)
    assert_equal(other.values(), saved)
    assert_equal(other.train(range(2, 5)).values(), final)
    assert_equal(other.masters(), run.masters())


def test_state_dict_is_fsdp2s(mesh, folder):
    """Keys, order, shapes and dtypes of the undedicated model; dedicated matrices are cut by DTensor's own rule."""
    run = Run(mesh).train(range(1))
    plain = OddModel().state_dict()
    state = run.model.state_dict()
    assert list(state) == list(plain)
    for key, value in state.items():
        assert value.shape == plain[key].shape and value.dtype == plain[key].dtype, key
    assert state["layers.0.tied.weight"] is state["layers.1.tied.weight"]
    for name in [param.name for param in dmuon.get_dedicated_params(run.model)]:
        by_torch = torch.distributed.tensor.distribute_tensor(plain[name], mesh, state[name].placements)
        assert state[name].to_local().shape == by_torch.to_local().shape, name
    assert list(run.model.layers[1].state_dict()) == [k[9:] for k in plain if k.startswith("layers.1.")]


@pytest.mark.parametrize("replicate_async", [True, False], ids=["async", "sync"])
def test_save_and_load_checkpoint(mesh_2d, folder, replicate_async):
    """dmuon's own directory: values, options, and anything else the user adds."""
    setup = Setup(make=OddModel, replicate_async=replicate_async)
    run = Run(mesh_2d, setup=setup, lr=0.004).train(range(2))
    dmuon.save_checkpoint(folder / "a", run.model, run.optimizer, extra={"step": 2, "order": torch.arange(5)})
    saved = run.values()
    final = run.train(range(2, 4)).values()

    other = Run(mesh_2d, seed=1, setup=setup, lr=0.3)
    extra = dmuon.load_checkpoint(
        folder / "a", other.model, other.optimizer, extra={"step": 0, "order": torch.zeros(5, dtype=torch.long)}
    )
    assert extra["step"] == 2 and torch.equal(extra["order"], torch.arange(5))
    assert [group["lr"] for group in other.optimizer.param_groups if group["use_muon"]] == [0.004]
    assert_equal(other.values(), saved)
    assert_equal(other.train(range(2, 4)).values(), final)
