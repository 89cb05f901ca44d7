"""Gradients of all ranks at once: one global norm to clip by, one verdict of the gradient scaler."""

import pytest
import torch
import torch.distributed as dist
from reference import TinyModel, batch, loss_of
from setup import Setup, assert_same, step_both, update_tolerance
from torch.distributed.fsdp import fully_shard

import dmuon

pytestmark = pytest.mark.ranks(1, 2, 3)

INF = float("inf")


def small() -> TinyModel:
    return TinyModel(dim=16, hidden=24, layers=2)


def backward_both(model, reference, seed: int, rank: int, world_size: int, factor: float = 1.0) -> None:
    (factor * loss_of(model, batch(seed, rank))).backward()
    reference.backward([factor * loss_of(reference, batch(seed, r)) for r in range(world_size)], world_size)


def clip_both(target, reference, max_norm: float, norm_type: float) -> None:
    expected = torch.nn.utils.clip_grad_norm_(reference.model.parameters(), max_norm, norm_type)
    total = dmuon.clip_grad_norm_(target, max_norm, norm_type)
    assert total.shape == ()
    torch.testing.assert_close(total.cpu(), expected.cpu(), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, INF])
@pytest.mark.parametrize("max_norm", [0.01, 1e6], ids=["clips", "leaves"])
def test_clipping_equals_one_process(mesh, rank, world_size, norm_type, max_norm):
    model, optimizer, reference = Setup(make=small).build(mesh)
    for step in range(2):
        backward_both(model, reference, 10 * step, rank, world_size)
        clip_both(model if step else optimizer, reference, max_norm, norm_type)
        assert_same(model, reference, 1e-5, grads=True)
        backward_both(model, reference, 10 * step + 1, rank, world_size)  # adds to the clipped ones
        assert_same(model, reference, 1e-5, grads=True)
        clip_both(model, reference, max_norm, norm_type)
        step_both(mesh, model, optimizer, reference)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("norm_type", [2.0, INF])
def test_replicas_are_counted_once(mesh_2d, rank, world_size, norm_type):
    model, _, reference = Setup(make=small).build(mesh_2d)
    backward_both(model, reference, 0, rank, world_size)
    clip_both(model, reference, 0.01, norm_type)
    assert_same(model, reference, 1e-5, grads=True)


def test_a_plain_parameter_is_counted_once(mesh, rank, world_size):
    """One that the user averages himself and names in param_groups."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 4))
    dmuon.dedicate_params(model, mesh, lambda n, p: n == "0.weight")
    fully_shard(model[1], mesh=mesh)
    for p in model.parameters():
        p.grad = torch.full_like(p, 2.0) if not p.is_meta else None
    total = dmuon.clip_grad_norm_(model, 1.0)
    count = 6 * 8 + 8 + 8 * 4 + 4
    torch.testing.assert_close(total.cpu(), torch.tensor(2.0 * count**0.5))


@pytest.mark.parametrize(
    "dtype,matrices,value", [(torch.float64, 1, 1.0), (torch.float32, 20, 1e18)], ids=["fp64 on one rank", "huge"]
)
def test_norms_are_summed_in_one_wide_dtype(mesh, dtype, matrices, value):
    """A rank that counts nothing takes part with a zero of the same dtype.  The squares of each matrix fit into fp32,
    those of all of them do not.
    """
    model = torch.nn.Sequential(*[torch.nn.Linear(6, 8, bias=False).to(dtype) for _ in range(matrices)])
    dmuon.dedicate_params(model, mesh, lambda n, p: True)
    for param in dmuon.get_dedicated_params(model):
        if param.is_owner:
            param.parameter.grad = torch.full_like(param.parameter, value)
    total = dmuon.clip_grad_norm_(model, 1.0)
    assert total.dtype == dtype
    torch.testing.assert_close(total.cpu(), torch.tensor(value * (48 * matrices) ** 0.5, dtype=dtype))


def test_bad_norms_are_refused(mesh, rank):
    model, optimizer, _ = Setup(make=small).build(mesh)
    with pytest.raises(ValueError, match="norm_type must be > 0"):
        dmuon.clip_grad_norm_(model, 1.0, 0.0)
    with pytest.raises(ValueError, match="Call dedicate_params"):
        dmuon.clip_grad_norm_(small(), 1.0)
    (float("nan") * loss_of(model, batch(0, rank))).backward()
    before = [p.grad for p in model.parameters()]
    with pytest.raises(RuntimeError, match=r"norm of order 2\.0 is nan; nothing was scaled"):
        dmuon.clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=True)
    assert all(p.grad is grad for p, grad in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("unscales_first", [False, True], ids=["step", "unscale-clip-step"])
def test_grad_scaler_skips_on_all_ranks_together(mesh, rank, world_size, unscales_first):
    """In turn, another rank's loss is infinite: nobody steps, and the scale shrinks everywhere."""
    model, optimizer, reference = Setup(make=small).build(mesh)
    scaler = dmuon.GradScaler(mesh.device_type, init_scale=2.0**8, growth_interval=2)
    scale, finite_steps = 2.0**8, 0
    for step in range(5):
        broken = step % 2 == 1
        culprit = broken and (step // 2) % world_size == rank
        loss = loss_of(model, batch(step, rank))
        scaler.scale(loss * INF if culprit else loss).backward()
        if unscales_first:
            scaler.unscale_(optimizer)
            dmuon.clip_grad_norm_(optimizer, 0.5)
        scaler.step(optimizer)
        scaler.update()
        if broken:
            scale, finite_steps = scale * 0.5, 0
        else:
            finite_steps += 1
            scale, finite_steps = (scale * 2.0, 0) if finite_steps == 2 else (scale, finite_steps)
            reference.backward([loss_of(reference, batch(step, r)) for r in range(world_size)], world_size)
            if unscales_first:
                torch.nn.utils.clip_grad_norm_(reference.model.parameters(), 0.5)
            reference.step()
        assert scaler.get_scale() == scale
        assert_same(model, reference, update_tolerance(mesh, 5e-6))
        optimizer.zero_grad()
        reference.zero_grad()


def test_torchs_grad_scaler_is_refused(mesh, rank):
    """Without FSDP2 parameters it would run, and ranks would disagree."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 6, bias=False), torch.nn.Linear(6, 6, bias=False))
    dmuon.dedicate_params(model, mesh, lambda n, p: True)
    optimizer = dmuon.Muon(model)
    scaler = torch.amp.GradScaler(mesh.device_type)
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(rank)).to(mesh.device_type)
    scaler.scale(model(x).pow(2).mean()).backward()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="use dmuon.GradScaler"):
        scaler.step(optimizer)
    assert all(torch.equal(a, p) for a, p in zip(before, model.parameters(), strict=True) if not p.is_meta)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_half_precision_sums_do_not_overflow(mesh, rank, world_size, dtype):
    """fp16's largest value is 65504: the sum over ranks of gradients near it must not become infinite."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False))
    weight = model[0].weight
    policy = torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    dmuon.dedicate_params(model, mesh, lambda n, p: True, mp_policy=policy)
    x = torch.full((1, 8), 200.0, device=mesh.device_type, dtype=dtype)
    (200.0 * model(x)).sum().backward()
    (param,) = dmuon.get_dedicated_params(model)
    if param.is_owner:
        torch.testing.assert_close(param._reduced_grad.cpu(), torch.full_like(weight, 40000.0), rtol=4e-3, atol=0.0)


@pytest.mark.parametrize("way", ["clip", "zero", "replace"])
def test_reproducible_sums_respect_what_the_user_did_to_the_gradient(mesh, rank, world_size, way):
    """The tree of a reproducible sum goes on from `.grad` as it is, not as it was."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 6, bias=False))
    weight = model[0].weight.detach().clone().requires_grad_()
    dmuon.dedicate_params(model, mesh, lambda n, p: True, reproducible=True)
    (param,) = dmuon.get_dedicated_params(model)

    def run(seed: int) -> None:
        inputs = [torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * seed + r)) for r in range(world_size)]
        model(inputs[rank].to(mesh.device_type)).pow(2).mean().backward()
        for x in inputs:
            ((x @ weight.T).pow(2).mean() / world_size).backward()

    def change(grad: torch.Tensor | None, p: torch.Tensor) -> None:
        if grad is None:
            return
        if way == "clip":
            grad.mul_(0.25)
        elif way == "zero":
            grad.zero_()
        else:
            p.grad = grad * 3.0

    run(0), run(1), run(2)
    change(param.parameter.grad, param.parameter)
    change(weight.grad, weight)
    run(3), run(4)
    if param.is_owner:
        torch.testing.assert_close(param._reduced_grad.cpu(), weight.grad, rtol=1e-5, atol=1e-7)


def test_no_rank_waits_for_a_rank_without_gradients(mesh, rank, world_size):
    """Ranks that own nothing, or whose matrices nobody used, take part all the same."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 6, bias=False))
    dmuon.dedicate_params(model, mesh, lambda n, p: True)
    assert dmuon.clip_grad_norm_(model, 1.0).item() == 0.0
    model(torch.ones(1, 6, device=mesh.device_type)).sum().backward()
    totals = [None] * world_size
    dist.all_gather_object(totals, dmuon.clip_grad_norm_(model, 1.0).item())
    assert len(set(totals)) == 1 and totals[0] > 0.0
