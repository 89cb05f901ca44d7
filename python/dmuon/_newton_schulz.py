"""Newton-Schulz for users."""

from collections.abc import Sequence

import torch


def newton_schulz(
    x_or_list: torch.Tensor | Sequence[torch.Tensor],
    *,
    backend: str = "gram",
    steps: int = 5,
    coefficients: str = "polar_express",
) -> torch.Tensor | list[torch.Tensor]:
    """Replaces each matrix by nearly its polar factor U V^T.

    x_or_list: [rows, cols], or [batch, rows, cols], or a list of matrices of any shapes.
    backend: "gram" (default), "gram_accurate" or "standard".  coefficients: "polar_express", "you", "keller_jordan".
    Returns the same structure, shapes and dtypes.  Raises RuntimeError for an unknown name or steps < 1.
    """
    if not isinstance(x_or_list, torch.Tensor):
        return list(torch.ops.dmuon.newton_schulz(list(x_or_list), backend, steps, coefficients))
    if x_or_list.ndim == 3:
        return torch.stack(torch.ops.dmuon.newton_schulz(list(x_or_list.unbind()), backend, steps, coefficients))
    return torch.ops.dmuon.newton_schulz([x_or_list], backend, steps, coefficients)[0]
