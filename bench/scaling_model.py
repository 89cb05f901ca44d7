"""What the plan and a small model of the step predict for a mesh, before it exists; used by scaling.py.

Step = the model's compute + the communication that nothing hides + the largest owner's update + AdamW's share.
Compute and AdamW come from a measurement (`Constants`), the update from the plan, bytes from the formulas of
docs/hsdp.md, bandwidths from a measurement or from `--node-bandwidth`.  Left out: that communication slows the kernels
it runs beside, latency, and uneven bytes of owners.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from llama import Llama, LlamaConfig
from step_time import OPTIONS, POLICY, is_matrix
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import dmuon

COMPUTE_BYTES, REDUCE_BYTES = POLICY.param_dtype.itemsize, POLICY.reduce_dtype.itemsize
GATHERS = {"z3": 2, "z2": 1}
"""Per step."""
ASKED = 16
KINDS = ("gather", "reduce", "replicate_reduce", "publish")
Bytes = dict[str, float]
"""By KINDS, on the wire in one step, summed over all ranks."""


@dataclass(frozen=True)
class Shape:
    """Of a mesh.  `replicate` is None without a replicate axis."""

    shard: int
    replicate: int | None = None

    @property
    def replicas(self) -> int:
        return self.replicate or 1

    @property
    def ranks(self) -> int:
        return self.replicas * self.shard

    def __str__(self) -> str:
        return str(self.shard) if self.replicate is None else f"{self.replicate}x{self.shard}"

    def make(self, device: str) -> DeviceMesh:
        if self.replicate is None:
            return init_device_mesh(device, (self.shard,), mesh_dim_names=("shard",))
        return init_device_mesh(device, (self.replicate, self.shard), mesh_dim_names=("replicate", "shard"))


def parse_shape(text: str) -> Shape:
    """ "8": shard only.  "2x4": two replicas of four ranks."""
    sides = text.split("x")
    if len(sides) > 2 or not all(side.isdigit() and int(side) > 0 for side in sides):
        raise ValueError(f"expected RANKS, as 8, or REPLICATExSHARD, as 2x4, found {text}")
    return Shape(int(sides[-1]), int(sides[0]) if len(sides) == 2 else None)


def all_shapes(ranks: int) -> list[Shape]:
    """Shard only, and every number of replicas above one."""
    return [Shape(ranks)] + [Shape(ranks // r, r) for r in range(2, ranks + 1) if ranks % r == 0]


def predicted_shapes(ranks: int, node: int) -> list[Shape]:
    """Shard only; from 8 ranks on also one replica a node, or two replicas if there is one node."""
    shard = min(node, ranks // 2)
    hsdp = ranks >= 8 and ranks % shard == 0
    return [Shape(ranks)] + ([Shape(shard, ranks // shard)] if hsdp else [])


@dataclass(frozen=True)
class ModelSizes:
    """matrices: what compute_balanced_assignment takes.  rest: elements that FSDP2 keeps."""

    matrices: list[tuple[str, int, int, str]]
    rest: int
    layers: int

    @property
    def elements(self) -> int:
        return sum(rows * cols for _, rows, cols, _ in self.matrices)


def model_sizes(config: LlamaConfig) -> ModelSizes:
    with torch.device("meta"):
        named = list(Llama(config).named_parameters())
    matrices = [(n, *p.shape, ".".join(n.split(".")[:2])) for n, p in named if is_matrix(n, p)]
    return ModelSizes(matrices, sum(p.numel() for n, p in named if not is_matrix(n, p)), config.layers)


def owned_bytes(shape: Shape, elements: int, gathers: int, sent: int = REDUCE_BYTES) -> Bytes:
    """Of dedicated matrices.  sent: bytes of an element of an unreduced gradient on the wire."""
    replicas, peers = shape.replicas, shape.shard - 1
    return {
        "gather": gathers * replicas * peers * elements * COMPUTE_BYTES,
        "reduce": replicas * peers * elements * sent,
        "replicate_reduce": (replicas - 1) * elements * REDUCE_BYTES,
        "publish": (replicas - 1) * elements * COMPUTE_BYTES,
    }


def sharded_bytes(shape: Shape, elements: int, gathers: int) -> Bytes:
    """Of FSDP2's parameters: an all-reduce across replicas moves twice a reduction's, and nothing is published."""
    owned = owned_bytes(shape, elements, gathers)
    return owned | {"replicate_reduce": 2 * owned["replicate_reduce"], "publish": 0}


def add(*several: Bytes) -> Bytes:
    return {kind: sum(traffic[kind] for traffic in several) for kind in KINDS}


@dataclass(frozen=True)
class Constants:
    """Milliseconds of one rank that has everything: forward and backward with Muon, both with AdamW, AdamW on what
    FSDP2 keeps beside Muon, and AdamW on all parameters.  Bandwidths: GB/s that reach a rank, inside a node of `node`
    ranks and between nodes.  sources: where each comes from.
    """

    forward_ms: float
    backward_ms: float
    adamw_compute_ms: float
    rest_ms: float
    adamw_ms: float
    link_gb: float
    node_gb: float
    node: int
    sources: dict[str, str] = field(default_factory=dict)

    def axis_gb(self, shape: Shape) -> tuple[float, float]:
        """Of the shard axis and of the replicate axis.  A node holds consecutive ranks."""
        inside = (shape.shard <= self.node, shape.ranks <= self.node)
        return tuple(self.link_gb if fits else self.node_gb for fits in inside)


def wire_ms(shape: Shape, traffic: Bytes, constants: Constants) -> tuple[float, float]:
    """Of forward and backward, and of the publishes; every rank's axes carry an equal part."""
    shard, replicate = (1e-6 / (gb * shape.ranks) for gb in constants.axis_gb(shape))
    passes = (traffic["gather"] + traffic["reduce"]) * shard + traffic["replicate_reduce"] * replicate
    return passes, traffic["publish"] * replicate


def exposed_ms(hidden: float, under: float, ends: float) -> float:
    """Communication `hidden` runs beside compute `under`, except its `ends`, which have nothing beside them."""
    return ends + max(0.0, hidden - ends - under)


def predict_steps(shape: Shape, sizes: ModelSizes, mode: str, owner_ms: float, constants: Constants) -> dict[str, Any]:
    """Of dmuon and of FSDP2 + AdamW.  The ends: one gather and one reduction of a layer and of FSDP2's root."""
    gathers, layer = GATHERS[mode], sizes.elements // sizes.layers
    compute = constants.forward_ms + constants.backward_ms
    rest = sharded_bytes(shape, sizes.rest, gathers)
    rest_once = sharded_bytes(shape, sizes.rest, 1)
    muon, publish = wire_ms(shape, add(owned_bytes(shape, sizes.elements, gathers), rest), constants)
    muon_ends, _ = wire_ms(shape, add(owned_bytes(shape, layer, 1), rest_once), constants)
    adamw, _ = wire_ms(shape, add(sharded_bytes(shape, sizes.elements, gathers), rest), constants)
    adamw_ends, _ = wire_ms(shape, add(sharded_bytes(shape, layer, 1), rest_once), constants)
    muon_exposed = exposed_ms(muon, compute, muon_ends) + exposed_ms(publish, owner_ms + constants.forward_ms, 0.0)
    adamw_exposed = exposed_ms(adamw, constants.adamw_compute_ms, adamw_ends)
    return {
        "compute_ms": compute,
        "exposed_ms": muon_exposed,
        "step_ms": compute + muon_exposed + owner_ms + constants.rest_ms / shape.shard,
        "adamw_exposed_ms": adamw_exposed,
        "adamw_step_ms": constants.adamw_compute_ms + adamw_exposed + constants.adamw_ms / shape.shard,
    }


def predicted_memory(shape: Shape, rank: int, config: LlamaConfig, mode: str) -> tuple[int, int]:
    """Bytes dmuon holds between steps and at the worst moment on that rank, from a model without memory in a process
    group without peers.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=shape.ranks)
    try:
        mesh = shape.make("cpu")
        with torch.device("meta"):
            model = Llama(config)
        dmuon.dedicate_params(
            model,
            mesh["shard"],
            is_matrix,
            replicate_mesh=None if shape.replicate is None else mesh["replicate"],
            reshard_after_forward=mode == "z3",
            mp_policy=POLICY,
            **OPTIONS.get("nccl", {}),
        )
        report = dmuon.memory_report(model)
        peak = max(report.predicted_forward_peak, report.predicted_backward_peak)
        return report.predicted_resident, peak
    finally:
        dist.destroy_process_group()


def largest_memory(shape: Shape, state: list[int], config: LlamaConfig, mode: str) -> tuple[int, int]:
    """Over the ranks; of more than ASKED, over those with the most and the least state (which gathers the most)."""
    ranks = range(shape.ranks)
    asked = ranks if shape.ranks <= ASKED else (max(ranks, key=state.__getitem__), min(ranks, key=state.__getitem__))
    resident, peak = zip(*(predicted_memory(shape, rank, config, mode) for rank in asked), strict=True)
    return max(resident), max(peak)


def balance(milliseconds: Iterable[float]) -> dict[str, Any]:
    """Of the slots, in the order of the global ranks."""
    slots = list(milliseconds)
    largest, mean = max(slots), sum(slots) / len(slots)
    return {"owner_ms": slots, "largest_ms": largest, "max_over_mean": largest / mean if mean else 1.0}


def predict(shape: Shape, config: LlamaConfig, mode: str, constants: Constants | None) -> dict[str, Any]:
    """One row of the table.  Bytes: held, of the rank that holds most; on the wire, the mean of the ranks."""
    sizes = model_sizes(config)
    plan = dmuon.compute_balanced_assignment(sizes.matrices, shape.shard, shape.replicas)
    loads = plan.loads()
    owners = balance(1e3 * seconds for seconds, _, _ in loads)
    state = [held for _, held, _ in loads]
    resident, peak = largest_memory(shape, state, config, mode)
    gathers = GATHERS[mode]
    owned, rest = owned_bytes(shape, sizes.elements, gathers), sharded_bytes(shape, sizes.rest, gathers)
    everything = sharded_bytes(shape, sizes.elements + sizes.rest, gathers)
    row = {
        "mesh": str(shape),
        "ranks": shape.ranks,
        "mode": mode,
        "largest_ms": owners["largest_ms"],
        "max_over_mean": owners["max_over_mean"],
        "without_matrix": sum(matrices == 0 for _, _, matrices in loads),
        "note": plan.balance_note(),
        "state_bytes": max(state),
        "resident_bytes": resident,
        "peak_bytes": peak,
        "wire_bytes": {kind: value / shape.ranks for kind, value in owned.items()},
        "fsdp2_wire_bytes": sum(rest.values()) / shape.ranks,
        "adamw_wire_bytes": sum(everything.values()) / shape.ranks,
    }
    return row if constants is None else row | predict_steps(shape, sizes, mode, owners["largest_ms"], constants)
