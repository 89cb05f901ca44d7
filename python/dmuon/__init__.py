"""dmuon: matrix optimizers with dedicated ownership under FSDP2.

dmuon.dedicate_params(model, mesh, predicate=lambda name, p: p.ndim == 2 and "layers" in name)
for layer in model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = dmuon.Muon(model, lr=0.02)
"""

from ._library import load as _load

_load()

from ._assignment import Assignment, compute_balanced_assignment  # noqa: E402
from ._dedicate import dedicate_params  # noqa: E402
from ._fsdp2 import install_patch, no_sync, uninstall_patch  # noqa: E402
from ._gradients import GradScaler, clip_grad_norm_  # noqa: E402
from ._handles import DedicatedParam, DedicatedParamGroup, get_dedicated_params  # noqa: E402
from ._hooks import register_forward_method  # noqa: E402
from ._muon import Muon  # noqa: E402
from ._newton_schulz import newton_schulz  # noqa: E402
from ._report import check_invariants, comm_stats, describe_progress, memory_report, publish  # noqa: E402
from ._save import export_safetensors, get_state_dict, import_state, load_checkpoint, save_checkpoint, set_state_dict  # noqa: E402  # noqa: E402

__version__ = "0.1.0"
__all__ = [
    "SMALL_PARAM_THRESHOLD", "Assignment", "DedicatedParam", "DedicatedParamGroup", "GradScaler", "Muon",
    "check_invariants", "clip_grad_norm_", "comm_stats", "compute_balanced_assignment", "dedicate_params",
    "describe_progress", "export_safetensors", "get_dedicated_params", "get_state_dict", "import_state",
    "install_patch", "load_checkpoint", "memory_report", "newton_schulz", "no_sync", "publish",
    "register_forward_method", "save_checkpoint", "set_state_dict", "uninstall_patch",
]  # fmt: skip

from torch import ops as _ops  # noqa: E402

SMALL_PARAM_THRESHOLD: int = _ops.dmuon.small_param_threshold()
"""Elements below which the matrices of one layer share an owner."""

install_patch()
