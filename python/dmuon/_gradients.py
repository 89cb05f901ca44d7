"""What needs the gradients of all ranks: one global norm, and one verdict about Inf and NaN."""

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor, Replicate

from ._handles import Dedication, all_dedications
from ._muon import Muon


@torch.no_grad()
def clip_grad_norm_(
    model_or_optimizer: nn.Module | Muon,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scales all gradients so that their one norm, over dedicated, FSDP2 and plain parameters of all ranks, is at most
    `max_norm`; collective.  Returns the norm before scaling: a 0-d tensor in the masters' dtype, equal on all ranks.

    As torch.nn.utils.clip_grad_norm_ on one process with the whole model (torch's own sees only this rank's matrices).
    Every value is counted once, whatever is sharded, owned or replicated.  Does not stop the host, unless
    error_if_nonfinite, which raises RuntimeError for a norm that is NaN or Inf before anything is scaled.
    Raises ValueError for norm_type <= 0 and for FSDP2 parameters sharded over other ranks than the dedicated ones.
    """
    if not norm_type > 0.0:
        raise ValueError(f"[dmuon.clip_grad_norm_] norm_type must be > 0 (inf is the largest value), got {norm_type}")
    if isinstance(model_or_optimizer, Muon):
        dedications = model_or_optimizer.dedications
        parameters = [p for group in model_or_optimizer.param_groups for p in group["params"]]
    else:
        dedications = all_dedications(model_or_optimizer, "clip_grad_norm_")
        parameters = list(model_or_optimizer.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    total = _global_norm(gradients, dedications, float(norm_type))
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"[dmuon.clip_grad_norm_] the gradients' norm of order {norm_type} is {total.item()}; nothing was scaled"
        )
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for local in _by_kind(_local(gradient) for gradient in gradients).values():
        torch._foreach_mul_(local, factor.to(local[0].device))
    return total


def _local(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _by_kind(tensors: Any) -> dict[tuple, list[torch.Tensor]]:
    """Foreach kernels want one device and one dtype."""
    kinds: dict[tuple, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        kinds[tensor.device, tensor.dtype].append(tensor)
    return kinds


def _global_norm(gradients: list[torch.Tensor], dedications: list[Dedication], order: float) -> torch.Tensor:
    dedication = dedications[0]
    _check_same_ranks(gradients, dedication.world_size)
    counted = _counted_here(gradients, dedications)
    # One dtype on every rank, whatever it counts; and wide enough for the power of any norm in fp32.
    total = torch.zeros((), dtype=torch.float64, device=dedication.unsharded[0].device)
    largest = order == float("inf")
    for (_, dtype), tensors in _by_kind(counted).items():
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        norms = torch.stack(torch._foreach_norm(tensors, order, dtype=wide)).to(total)
        total = torch.maximum(total, norms.max()) if largest else total + (norms**order).sum()
    dedication.all_reduce(total, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
    norm = total if largest else total ** (1.0 / order)
    return norm.to(dedication.params[0].parameter.dtype)


def _counted_here(gradients: list[torch.Tensor], dedications: list[Dedication]) -> list[torch.Tensor]:
    """This rank's parts of the gradients, less those that another rank counts."""
    dedicated = {id(param.parameter.grad) for each in dedications for param in each.params}
    counted = [_local(g) for g in gradients if id(g) in dedicated or _counts_here(g, dedications[0])]
    return [local for local in counted if local.numel()]


def _check_same_ranks(gradients: list[torch.Tensor], world_size: int) -> None:
    for gradient in gradients:
        if isinstance(gradient, DTensor) and gradient.device_mesh.size() != world_size:
            raise ValueError(
                f"[dmuon.clip_grad_norm_] a gradient of shape {tuple(gradient.shape)} is sharded over "
                f"{gradient.device_mesh.size()} ranks, the dedicated parameters over {world_size}: the norm over both "
                "would count some ranks twice. Use the same ranks for both."
            )


def _counts_here(gradient: torch.Tensor, dedication: Dedication) -> bool:
    """Whether this rank is the one that counts its part of a gradient that is not dedicated."""
    if not isinstance(gradient, DTensor):
        return dedication.is_first  # plain: every rank has all of it
    coordinate = gradient.device_mesh.get_coordinate()
    places = zip(gradient.placements, coordinate, strict=True)
    return all(index == 0 or not isinstance(placement, Replicate) for placement, index in places)


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler whose verdict about Inf and NaN is the same on all ranks, for `dmuon.Muon`.

    All ranks skip the same steps and keep the same scale.  Other optimizers are treated as in torch.
    """

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        if not isinstance(optimizer, Muon):
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        with torch.no_grad():
            for (device, dtype), local in _by_kind(_local(gradient) for gradient in gradients).items():
                if dtype == torch.float16 and not allow_fp16:
                    raise ValueError("[dmuon.GradScaler] gradients are float16; keep the masters in float32")
                if device != found_inf.device:
                    raise ValueError(f"[dmuon.GradScaler] gradients are on {device}, the scale on {found_inf.device}")
                torch._amp_foreach_non_finite_check_and_unscale_(local, found_inf, inv_scale)
            for dedication in optimizer.dedications:
                dedication.all_reduce(found_inf, dist.ReduceOp.MAX)
        return {found_inf.device: found_inf}

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """As in torch: skipped, on every rank, if any rank's gradients were not finite."""
        if not isinstance(optimizer, Muon):
            return super().step(optimizer, *args, **kwargs)
        optimizer._step_supports_amp_scaling = False
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            del optimizer._step_supports_amp_scaling
