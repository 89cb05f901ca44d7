"""What the runtime counted: bytes on the wire and bytes held."""

from dataclasses import dataclass

import torch.nn as nn

from ._handles import find_dedications, live_dedications, the_dedication


@dataclass(frozen=True)
class CommStats:
    """Grouped calls this rank made, and payload bytes: received in broadcasts, sent in reductions."""

    broadcast_calls: int
    broadcast_bytes: int
    reduce_calls: int
    reduce_bytes: int
    publish_calls: int = 0
    """Across replicas, after steps; 0 without a replicate mesh, like the rest below."""
    publish_bytes: int = 0
    replicate_reduce_calls: int = 0
    replicate_reduce_bytes: int = 0


def comm_stats(model: nn.Module, *, reset: bool = False) -> CommStats:
    """Counts since `dedicate_params` or the last reset.  Over N ranks a gather of P bytes counts (N-1) P in all."""
    dedication = the_dedication(model, "comm_stats")
    gather, reduce, replicate = dedication.comms
    counted = CommStats(*gather.stats()[:2], *reduce.stats()[2:], *(() if replicate is None else replicate.stats()))
    if reset:
        for comm in dedication.communicators():
            comm.reset_stats()
    return counted


def check_invariants(model: nn.Module) -> None:
    """One owner a matrix, published copies on its column only, reduced gradients on the owner only, equal replicas.

    Collective over the replicate mesh if there is one; otherwise local and cheap.  Raises RuntimeError naming
    parameter, rank and slot.
    """
    for dedication in find_dedications(model):
        dedication.runtime.check_invariants()
        dedication.runtime.check_replicas()


def publish(model: nn.Module) -> None:
    """Sends masters that were changed outside the optimizer to their replicas; collective.  No-op without replicas."""
    for dedication in find_dedications(model):
        dedication.publish()


def describe_progress(model: nn.Module | None = None) -> str:
    """For a hang: which collective this rank waits in and how far its passes have come, a line per dedication.

    Call it from another thread.  Without a model: of all models in this process.
    """
    dedications = live_dedications() if model is None else find_dedications(model)
    return "\n".join(dedication.runtime.progress() for dedication in dedications)


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of dmuon's own memory on this rank.  Predicted values follow from the plan alone."""

    predicted_resident: int
    """Masters, momentum, published copies, and memory that peers read gradients from."""
    predicted_momentum: int
    """And AdamW's moments of elementwise parameters."""
    predicted_forward_peak: int
    predicted_backward_peak: int
    live: int
    """Buffers and gradients at this moment; without the optimizer's momentum."""
    peak: int
    """Largest `live` since `memory_report(model, track=True)`; 0 if it was never called."""
    outgoing: int
    """Of `live`: memory that peers read gradients from; 0 unless `dedicate_params` chose comm="peer"."""


def memory_report(model: nn.Module, *, track: bool = False) -> MemoryReport:
    """`track=True` starts a new peak; tracking costs host time at every communication."""
    runtime = the_dedication(model, "memory_report").runtime
    if track:
        runtime.track_memory()
    return MemoryReport(*runtime.predict_memory(), runtime.live_bytes(), runtime.peak_bytes(), runtime.outgoing_bytes())
