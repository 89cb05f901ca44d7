"""Who owns what, as Python sees it."""

from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.nn as nn

from ._cut import PlanRows
from ._handles import DedicatedParam

Owner = int | tuple[int, int] | None


class Assignment(Mapping[nn.Parameter, Owner]):
    """Read-only mapping from each dedicated parameter (the one `model.parameters()` gives) to its owner.

    The owner is the shard coordinate, or (shard, replicate) with a replicate mesh; None where every rank owns rows.
    Prints as a table.
    """

    def __init__(self, params: list[DedicatedParam], plan: torch.ScriptObject) -> None:
        self._params = params
        self._plan = plan

    def __getitem__(self, parameter: nn.Parameter) -> Owner:
        for param in self._params:
            if param.parameter is parameter:
                return param.owner_rank
        raise KeyError("this is not a dedicated parameter of the model")

    def __iter__(self) -> Iterator[nn.Parameter]:
        return (param.parameter for param in self._params)

    def __len__(self) -> int:
        return len(self._params)

    def by_name(self) -> dict[str, Owner]:
        """Owner by fully qualified parameter name."""
        return {param.name: param.owner_rank for param in self._params}

    def loads(self) -> list[tuple[float, int, int]]:
        """Per slot: predicted optimizer seconds on the reference GPU, bytes of masters and state, parameters."""
        return self._plan.loads()

    @property
    def imbalance(self) -> float:
        """Largest predicted cost of a slot over the mean."""
        return self._plan.imbalance()

    def __str__(self) -> str:
        return self._plan.table()

    __repr__ = __str__


def compute_balanced_assignment(
    matrices: Iterable[tuple[str, int, int, str] | tuple[str, int, int, str, bool]],
    shard: int,
    replicate: int = 1,
    *,
    owner_strategy: str = "lpt",
    small_param_threshold: int | None = None,
) -> torch.ScriptObject:
    """The plan `dedicate_params` would use, without a model, a mesh or a process group.

    matrices: (name, rows, cols, layer key) each; equal keys are one layer.  A fifth True marks an elementwise
        parameter, which costs what AdamW costs; large ones are cut by rows, one entry of the plan for each slot.
    shard, replicate: sizes of the mesh axes.
    Returns a plan with `owners()`, `costs()`, `loads()`, `imbalance()`, `lower_bound()`, `balance_note()`,
    `fingerprint()` and `table()`.  Raises ValueError for bad input.
    """
    inputs = [(name, rows, cols, layer, any(mark)) for name, rows, cols, layer, *mark in matrices]
    return PlanRows(inputs, shard, replicate).plan(owner_strategy, small_param_threshold)
