"""What the runtime counted: bytes on the wire and bytes held."""

from dataclasses import dataclass

import torch.nn as nn

from ._handles import the_dedication


@dataclass(frozen=True)
class CommStats:
    """Grouped calls this rank made, and payload bytes: received in broadcasts, sent in reductions."""

    broadcast_calls: int
    broadcast_bytes: int
    reduce_calls: int
    reduce_bytes: int


def comm_stats(model: nn.Module, *, reset: bool = False) -> CommStats:
    """Counts since `dedicate_params` or the last reset.  Over N ranks a gather of P bytes counts (N-1) P in all."""
    dedication = the_dedication(model, "comm_stats")
    counted = [dedication.gather.stats()[:2], dedication.reduce.stats()[2:]]
    if reset:
        dedication.gather.reset_stats()
        dedication.reduce.reset_stats()
    return CommStats(*counted[0], *counted[1])


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of dmuon's own memory on this rank.  Predicted values follow from the plan alone."""

    predicted_resident: int
    """Masters, momentum and published copies."""
    predicted_momentum: int
    predicted_forward_peak: int
    predicted_backward_peak: int
    live: int
    """Buffers and gradients at this moment; without the optimizer's momentum."""
    peak: int
    """Largest `live` since `memory_report(model, track=True)`; 0 if it was never called."""


def memory_report(model: nn.Module, *, track: bool = False) -> MemoryReport:
    """`track=True` starts a new peak; tracking costs host time at every communication."""
    runtime = the_dedication(model, "memory_report").runtime
    if track:
        runtime.track_memory()
    return MemoryReport(*runtime.predict_memory(), runtime.live_bytes(), runtime.peak_bytes())
