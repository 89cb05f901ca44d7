"""Saved on one mesh, loaded on another: 1, 2, 3 and 4 ranks, 2x2 and 1x4, all inside one launch of 4 ranks."""

import itertools
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoints import Run, assert_close, assert_equal, loss_of, samples, whole
from plain_model import OddModel
from reference import MuonSettings, Reference
from setup import Setup, check_invariants
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import dmuon

pytestmark = pytest.mark.ranks(4)

NAMES = ("1", "2", "3", "4", "2x2", "1x4")
STEPS = 2


@pytest.fixture(scope="module")
def meshes(mesh) -> dict[str, DeviceMesh]:
    """The first n ranks; the others are on other meshes, and take no part."""
    if mesh.size() != 4:
        pytest.skip("the meshes are cut from 4 ranks")
    halves = init_device_mesh(mesh.device_type, (2, 2), mesh_dim_names=("all", "shard"))["shard"]
    ones = init_device_mesh(mesh.device_type, (4, 1), mesh_dim_names=("all", "shard"))["shard"]
    three, last = (DeviceMesh(mesh.device_type, ranks, mesh_dim_names=("shard",)) for ranks in ([0, 1, 2], [3]))
    rank = dist.get_rank()
    made = {"1": ones, "2": halves, "3": last if rank == 3 else three, "4": mesh}
    made["2x2"] = init_device_mesh(mesh.device_type, (2, 2), mesh_dim_names=("replicate", "shard"))
    made["2x2"].axes = {name: made["2x2"][name] for name in ("replicate", "shard")}
    made["1x4"] = init_device_mesh(mesh.device_type, (1, 4), mesh_dim_names=("replicate", "shard"))
    made["1x4"].axes = {name: made["1x4"][name] for name in ("replicate", "shard")}
    return {name: each if takes_part(name, rank) else None for name, each in made.items()}


def takes_part(name: str, rank: int) -> bool:
    return "x" in name or rank < int(name)


@pytest.fixture(scope="module")
def one_process() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights and momentum after 2 * STEPS steps in plain torch on the samples of all ranks."""
    torch.manual_seed(0)
    reference = Reference(OddModel(), MuonSettings())
    for step in range(2 * STEPS):
        reference.backward([loss_of(reference, samples(step))], 1)
        reference.step()
        reference.zero_grad()
    return {name: value.detach() for name, value in reference.model.named_parameters()}, reference.momentum


@dataclass
class Saved:
    """Trained runs of one recipe, one on every mesh, each saved in a folder with the mesh's name."""

    setup: Setup
    folder: Path
    values: dict[str, dict[str, torch.Tensor]]
    """What was saved on each mesh, on all ranks."""


@pytest.fixture(scope="module", params=["a", "c"])
def saved(request, meshes, module_folder) -> Saved:
    saved = Saved(Setup(make=OddModel, recipe=request.param), module_folder / request.param, {})
    for name in NAMES:
        values = None
        if meshes[name] is not None:
            values = Run(meshes[name], setup=saved.setup).train(range(STEPS)).save(saved.folder / name).values()
        everybody = [values]
        dist.broadcast_object_list(everybody, src=0)
        saved.values[name] = everybody[0]
    return saved


@pytest.mark.parametrize("source", NAMES)
def test_save_on_n_load_on_m(source, meshes, saved, one_process):
    """What is loaded has the bits of what was saved, and training goes on as one process does it."""
    for target in NAMES:
        mesh = meshes[target]
        if mesh is None:
            continue
        run = Run(mesh, seed=1, setup=saved.setup, lr=0.5, adamw_lr=0.5).load(saved.folder / source)
        assert_equal(run.values(), saved.values[source])
        if source == target or "4" in (source, target):
            compare_with_one_process(run.train(range(STEPS, 2 * STEPS)), one_process)
        check_invariants(run.model)


def compare_with_one_process(run: Run, one_process) -> None:
    weights, momentum = one_process
    found = whole(run.model.state_dict())
    assert_close({name: found[name] for name in weights}, weights, 2e-6)
    state = run.state()["optimizer"]["state"]
    buffers = {name: value["momentum_buffer"] for name, value in state.items() if "momentum_buffer" in value}
    assert_close(whole(buffers), momentum, 1e-5)


def test_dmuons_own_directories_cross_meshes_too(meshes, folder):
    """Of another mesh, and with the matrices in other optimizer groups."""
    for name in ("3", "2x2"):
        if meshes[name] is not None:
            run = Run(meshes[name]).train(range(STEPS))
            dmuon.save_checkpoint(folder / name, run.model, run.optimizer)
    dist.barrier()
    for source, target in (("3", "2x2"), ("2x2", "3"), ("2x2", "1"), ("3", "4")):
        if meshes[target] is None:
            continue
        run = Run(meshes[target], seed=1)
        by_layer = [
            {"params": [p for n, p in run.model.named_parameters() if ("layers.0" in n) == first], "name": str(first)}
            for first in (True, False)
        ]
        run.optimizer = dmuon.Muon(run.model, param_groups=by_layer)
        dmuon.load_checkpoint(folder / source, run.model, run.optimizer)
        assert {group["lr"] for group in run.optimizer.param_groups if group["use_muon"]} == {MuonSettings().lr}
        run.train(range(STEPS, STEPS + 1))


class Matrices(torch.nn.Module):
    """Only dedicated matrices: FSDP2's own sums are not reproducible across meshes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(14, 14, bias=False) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


class ReproducibleRun(Run):
    """Four micro-batches a step, summed in one tree whatever the mesh."""

    def __init__(self, mesh: DeviceMesh, seed: int) -> None:
        self.mesh = mesh
        torch.manual_seed(seed)
        self.model = Matrices().to(mesh.device_type)
        dmuon.dedicate_params(
            self.model,
            mesh.axes["shard"] if mesh.ndim == 2 else mesh,
            lambda name, p: True,
            replicate_mesh=mesh.axes["replicate"] if mesh.ndim == 2 else None,
            reproducible=True,
        )
        self.optimizer = dmuon.Muon(self.model, lr=0.01)

    def train(self, steps: range) -> "Run":
        ranks = self.mesh.size()
        size = 4 // ranks
        for step in steps:
            for index in range(dist.get_rank(), 4, ranks):
                x = torch.randn(3, 14, generator=torch.Generator().manual_seed(100 * step + index))
                (self.model(x.to(self.mesh.device_type)).pow(2).mean() / size).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self


def test_reproducible_runs_do_not_see_the_change_of_mesh(meshes, folder):
    """Two steps here and two there have the bits of four steps anywhere."""
    expected = [ReproducibleRun(meshes["4"], 0).train(range(4)).values()]
    names = ("1", "2", "4", "2x2")
    for name in names:
        if meshes[name] is not None:
            ReproducibleRun(meshes[name], 0).train(range(2)).save(folder / name)
    dist.barrier()
    for source, target in itertools.permutations(names, 2):
        if meshes[target] is not None:
            run = ReproducibleRun(meshes[target], 1).load(folder / source)
            assert_equal(run.train(range(2, 4)).values(), expected[0])
