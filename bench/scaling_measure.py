"""Measures dmuon and FSDP2 + AdamW on one mesh; used by scaling.py.  Everything here is collective."""

import argparse
import gc
import statistics
from typing import Any

import step_profile
import torch
import torch.distributed as dist
from llama import LlamaConfig
from scaling_model import COMPUTE_BYTES, GATHERS, KINDS, REDUCE_BYTES, Shape, balance, owned_bytes
from step_time import Batch, Contender, Mark, axes_of, build, make_batch, measure_shape
from torch.distributed.device_mesh import DeviceMesh

import dmuon

PROBE = 1 << 26
"""Bytes that a rank has after the gather that measures bandwidth: about a layer of the 1b preset."""
PROBES = 7


class OwnerClock:
    """Stands before a Muon optimizer's C++ stepper: the owner's part of a step, without AdamW and publishes."""

    def __init__(self, contender: Contender) -> None:
        self._stepper = contender.optimizer._stepper
        self._device = contender.device
        self._marks: list[tuple[Mark, Mark]] = []
        contender.optimizer._stepper = self

    def step(self, *arguments: object) -> object:
        begin = Mark(self._device)
        result = self._stepper.step(*arguments)
        self._marks.append((begin, Mark(self._device)))
        return result

    def take_ms(self) -> float:
        """Since the last call; the device has to be done."""
        total = sum(begin.ms(end) for begin, end in self._marks)
        self._marks.clear()
        return total

    def remove(self, contender: Contender) -> None:
        contender.optimizer._stepper = self._stepper


def by_rank(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def measure_owners(contender: Contender, batch: Batch, steps: int) -> dict[str, Any]:
    """Predicted and measured time of every owner, by global rank.  On the CPU the wall time, whoever else runs.
    The plan also predicts AdamW on dedicated parameters that are not matrices, which the clock does not see.
    """
    clock, samples = OwnerClock(contender), []
    for _ in range(steps):
        contender.step(batch())
        step_profile.synchronise(contender.device)
        samples.append(clock.take_ms())
    clock.remove(contender)
    contender.discard()
    predicted = [1e3 * seconds for seconds, _, _ in contender.assignment.loads()]
    return {"predicted": balance(predicted), "measured": balance(by_rank(statistics.median(samples)))}


def count_wire(contender: Contender, shape: Shape, batch: Batch) -> dict[str, dict[str, float]]:
    """Bytes of one step over all ranks, by KINDS: counted by dmuon's communicators, and by the formulas."""
    dmuon.comm_stats(contender.model, reset=True)
    contender.step(batch())
    contender.discard()
    stats = dmuon.comm_stats(contender.model)
    counted = (stats.broadcast_bytes, stats.reduce_bytes, stats.replicate_reduce_bytes, stats.publish_bytes)
    totals = [sum(values) for values in zip(*by_rank(counted), strict=True)]
    copies = contender.model._dmuon.comms[1].copies_from_peers()
    elements = sum(param.parameter.numel() for param in dmuon.get_dedicated_params(contender.model))
    gathers = GATHERS[contender.name.split("_")[1]]
    formula = owned_bytes(shape, elements, gathers, COMPUTE_BYTES if copies else REDUCE_BYTES)
    return {"counted": dict(zip(KINDS, totals, strict=True)), "formula": formula}


def count_memory(contender: Contender, batch: Batch) -> dict[str, list[int]]:
    """Bytes of dmuon's own memory by rank: what the plan said, and what was live at the worst moment of a step."""
    dmuon.memory_report(contender.model, track=True)
    contender.step(batch())
    step_profile.synchronise(contender.device)
    contender.discard()
    report = dmuon.memory_report(contender.model)
    peaks = max(report.predicted_forward_peak, report.predicted_backward_peak), report.peak + report.predicted_momentum
    resident = report.predicted_resident, report.live + report.predicted_momentum
    names = ("predicted_peak", "peak", "predicted_resident", "resident")
    return {name: by_rank(value) for name, value in zip(names, (*peaks, *resident), strict=True)}


def bandwidth(axis: DeviceMesh) -> float | None:
    """GB/s that reach a rank in an all-gather over the axis, median; None on an axis of one rank."""
    if axis.size() == 1:
        return None
    part = torch.zeros(PROBE // axis.size(), dtype=torch.uint8, device=axis.device_type)
    whole = torch.empty(part.numel() * axis.size(), dtype=torch.uint8, device=axis.device_type)
    samples = []
    for _ in range(PROBES + 2):
        dist.barrier()
        step_profile.synchronise(axis.device_type)
        begin = Mark(axis.device_type)
        dist.all_gather_into_tensor(whole, part, group=axis.get_group())
        end = Mark(axis.device_type)
        step_profile.synchronise(axis.device_type)
        samples.append(begin.ms(end))
    return (whole.numel() - part.numel()) / statistics.median(samples[2:]) / 1e6


def settle(device: str) -> None:
    """No rank reads a peer's memory any more: models may go."""
    step_profile.synchronise(device)
    dist.barrier()


def free(device: str) -> None:
    """Gives back what the contenders held."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    settle(device)


def measure_mode(
    shape: Shape, mesh: DeviceMesh, mode: str, config: LlamaConfig, args: argparse.Namespace
) -> dict[str, Any]:
    """All contenders of z2 or z3 are built, run in turn, looked into and freed."""
    batches = {tokens: make_batch(tokens, config, args.device) for tokens in args.tokens}
    batch = batches[args.tokens[0]]
    names = [name for name in args.contenders if name.split("_")[1] == mode]
    contenders = [build(name, mesh, config, batch) for name in names]
    result = {"tokens": {tokens: measure_shape(contenders, tokens, config, args) for tokens in args.tokens}}
    for contender in contenders:
        if contender.assignment is None:
            continue
        result[contender.name] = {
            "owners": measure_owners(contender, batch, max(args.steps, 3)),
            "wire": count_wire(contender, shape, batch),
            "memory": count_memory(contender, batch),
        }
    settle(args.device)
    return result


def measure_mesh(shape: Shape, config: LlamaConfig, args: argparse.Namespace) -> dict[str, Any]:
    """By tokens and contender: what step_time.py gives.  By contender of dmuon: owners, wire and memory."""
    mesh = shape.make(args.device)
    row: dict[str, Any] = {
        "mesh": str(shape),
        "ranks": shape.ranks,
        "gb_per_second": {name: bandwidth(axis) for name, axis in axes_of(mesh).items()},
        "tokens": {tokens: {"contenders": {}, "profiles": {}} for tokens in args.tokens},
        "dmuon": {},
    }
    for mode in dict.fromkeys(name.split("_")[1] for name in args.contenders):
        measured = measure_mode(shape, mesh, mode, config, args)
        free(args.device)
        for tokens, figures in measured.pop("tokens").items():
            for key, values in figures.items():
                row["tokens"][tokens][key].update(values)
        row["dmuon"].update(measured)
    return row
