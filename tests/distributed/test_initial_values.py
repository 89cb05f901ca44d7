"""Every rank starts from the same values, however the ranks were seeded and wherever the model was built."""

import copy

import pytest
import torch
import torch.distributed as dist
from reference import MuonSettings, Reference, TinyModel, batch, is_matrix, loss_of
from setup import assert_same, full_values, update_tolerance
from torch.distributed.fsdp import fully_shard

import dmuon

pytestmark = pytest.mark.ranks(1, 2, 3)


def from_rank_0(value):
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def shard(model, mesh) -> None:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def run_one_step(mesh, model, reference, rank, world_size) -> None:
    s = reference.settings
    optimizer = dmuon.Muon(model, lr=s.lr, weight_decay=s.weight_decay, adamw_lr=s.adamw_lr)
    loss_of(model, batch(0, rank)).backward()
    reference.backward([loss_of(reference, batch(0, r)) for r in range(world_size)], world_size)
    optimizer.step()
    reference.step()
    assert_same(model, reference, update_tolerance(mesh))


def test_different_seeds_take_rank_0s_values(mesh, rank, world_size):
    torch.manual_seed(rank)
    model = TinyModel()
    model.register_buffer("noise", torch.randn(5))
    expected = from_rank_0({name: value.clone() for name, value in model.state_dict().items()})
    reference = Reference(TinyModel().to(mesh.device_type), MuonSettings())
    reference.model.load_state_dict({k: v for k, v in expected.items() if k != "noise"})
    dmuon.dedicate_params(model, mesh, is_matrix)
    shard(model, mesh)
    for name, value in full_values(model).items():
        assert torch.equal(value.cpu(), expected[name]), name
    assert torch.equal(model.noise.cpu(), expected["noise"])
    run_one_step(mesh, model, reference, rank, world_size)


def init(model) -> None:
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def test_meta_model_materialised_before(mesh, rank, world_size):
    with torch.device("meta"):
        model = TinyModel()
    model.to_empty(device=mesh.device_type)
    torch.manual_seed(rank)
    init(model)
    reference = Reference(TinyModel().to(mesh.device_type), MuonSettings())
    reference.model.load_state_dict(from_rank_0(copy.deepcopy(model.state_dict())))
    dmuon.dedicate_params(model, mesh, is_matrix)
    shard(model, mesh)
    run_one_step(mesh, model, reference, rank, world_size)


def test_meta_model_materialised_after(mesh, rank, world_size):
    """The owner initialises its matrices, FSDP2's shards are every rank's own: nobody holds a full model."""
    with torch.device("meta"):
        model = TinyModel()
    assignment = dmuon.dedicate_params(model, mesh, is_matrix)
    shard(model, mesh)
    if any(param.is_owner for param in dmuon.get_dedicated_params(model)):
        with pytest.raises(RuntimeError, match=r"'layers\.\d\.\w+\.weight' is still on the meta device on its owner"):
            dmuon.Muon(model)
    model.to_empty(device=mesh.device_type)
    for param in dmuon.get_dedicated_params(model):
        assert param.is_owner == (not param.parameter.is_meta), f"{param}: a placeholder took memory"
        assert assignment[param.parameter] == param.owner_rank
    init(model)
    reference = Reference(gather_model(model, mesh.device_type), MuonSettings())
    run_one_step(mesh, model, reference, rank, world_size)


def gather_model(model, device: str) -> TinyModel:
    """A plain copy of the distributed model on every rank."""
    plain = TinyModel().to(device)
    values = full_values(model)
    owners = {param.name: param.owner_rank for param in dmuon.get_dedicated_params(model)}
    with torch.no_grad():
        for name, target in plain.named_parameters():
            if name in values:
                target.copy_(values[name])
            if name in owners:
                dist.broadcast(target, src=owners[name])
    return plain


def test_changed_masters_are_seen_by_the_next_forward(mesh, rank):
    """In place, through .data, and by replacing .data: no way of changing a master is missed, in bf16 either."""
    torch.manual_seed(0)
    model = TinyModel()
    dmuon.dedicate_params(model, mesh, is_matrix, compute_dtype=torch.bfloat16)
    model.to(torch.float32)
    changes = [
        lambda p: p.mul_(0.5),
        lambda p: p.data.mul_(0.5),
        lambda p: setattr(p, "data", p.data * 0.5),
    ]
    layer = model.layers[0].to(mesh.device_type)
    layer.norm.to(torch.bfloat16), layer.up.bias.data.zero_()
    layer.up.bias.data = layer.up.bias.data.to(torch.bfloat16)
    x = torch.randn(3, 24, generator=torch.Generator().manual_seed(5)).bfloat16().to(mesh.device_type)
    plain = [param for param in dmuon.get_dedicated_params(model) if param.name == "layers.0.mix.weight"][0]
    for change in changes:
        with torch.no_grad():
            if plain.is_owner:
                change(plain.parameter)
            weight = torch.empty(24, 24, device=mesh.device_type)
            if plain.is_owner:
                weight.copy_(plain.parameter)
            dist.broadcast(weight, src=plain.owner_rank)
            seen = []
            handle = layer.mix.register_forward_hook(lambda m, a, o, seen=seen: seen.append(m.weight.detach().clone()))
            layer(x)
            handle.remove()
        assert torch.equal(seen[0], weight.bfloat16())
