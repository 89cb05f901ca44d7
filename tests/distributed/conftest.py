"""Distributed tests: every rank of one launch runs the same tests in the same order.

    torchrun --standalone --nproc-per-node 3 -m pytest tests/distributed

Without torchrun the tests run on one rank.  Rank 0 reports; the other ranks print only their failures.  A failure on
any rank fails the launch, and so does a hang: after TEST_LIMIT a rank prints which collective it waits in, and ends.
"""

import faulthandler
import os
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import IO

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import dmuon

RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
COLLECTIVE_TIMEOUT = timedelta(seconds=300)
TEST_LIMIT = 240.0
"""Seconds; less than COLLECTIVE_TIMEOUT, so that a hang is reported before it becomes an error of the backend.  No test
needs a tenth of it on an idle machine: it tells a hang from a slow machine, and never judges speed."""


class FailureReporter:
    """Prints the failures of a rank that is not 0, at once: the launch may be stopped before the session ends."""

    def __init__(self, stderr: IO[str]) -> None:
        self.stderr = stderr

    def _print(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed:
            self.stderr.write(f"\n== FAILED on rank {RANK}: {report.nodeid}\n{report.longreprtext}\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._print(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._print(report)


_DEVICE_HELP = (
    "where the tests' models live: cuda is one GPU a rank (NCCL); shared-gpu puts all ranks on GPU 0 (gloo; only for "
    "tests without FSDP2, which needs collectives that gloo lacks on CUDA)"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--on-device", default="cpu", choices=["cpu", "cuda", "shared-gpu"], help=_DEVICE_HELP)
    parser.addoption("--comm", default="auto", choices=["auto", "nccl", "peer"], help="of every dedicate_params")


_launch_stderr = pytest.StashKey[IO[str]]()
"""Of the launch: pytest captures file descriptor 2 while tests run, and does not yet in pytest_configure."""


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    dmuon.dedicate_params.__kwdefaults__["comm"] = config.getoption("--comm")
    config.stash[_launch_stderr] = os.fdopen(os.dup(sys.__stderr__.fileno()), "w", buffering=1)
    if RANK != 0:
        config.get_terminal_writer()._file = open(os.devnull, "w")  # noqa: SIM115 (open until the process ends)
        config.pluginmanager.register(FailureReporter(config.stash[_launch_stderr]))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test marked `ranks(2, 3)` runs in launches of 2 and 3 ranks, and of more than 4; others in every launch.  The
    closest mark counts.
    """
    chosen, left_out = [], []
    for item in items:
        mark = item.get_closest_marker("ranks")
        (chosen if mark is None or WORLD_SIZE > 4 or WORLD_SIZE in mark.args else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = chosen


_exit_status = pytest.StashKey[int]()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[_exit_status] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Leaves without running destructors: a gloo thread that wants the GIL while Python shuts down aborts the process
    (pytorch issue 190489).  The reports are out and the process group is destroyed by now.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(config.stash.get(_exit_status, int(pytest.ExitCode.INTERNAL_ERROR)))


@pytest.fixture(scope="session", autouse=True)
def process_group(pytestconfig: pytest.Config) -> Iterator[dist.ProcessGroup]:
    """The default group: gloo, and NCCL beside it when every rank has a GPU of its own."""
    shared = pytestconfig.getoption("--on-device") == "shared-gpu"
    has_gpus = torch.cuda.device_count() >= WORLD_SIZE and not shared
    if has_gpus or shared:
        torch.cuda.set_device(0 if shared else RANK)
        torch.cuda.init()  # a mesh chooses a device by rank for a process that has not
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if has_gpus else "gloo",
        timeout=COLLECTIVE_TIMEOUT,
        **({} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}),
    )
    yield dist.group.WORLD
    dist.destroy_process_group()


def _report_hang(test: str, stderr: IO[str]) -> None:
    stderr.write(f"\n== {test} ran longer than {TEST_LIMIT} s on rank {RANK}\n{dmuon.describe_progress()}\n")
    faulthandler.dump_traceback(stderr, all_threads=True)
    stderr.flush()
    os._exit(3)


@pytest.fixture(autouse=True)
def watchdog(request: pytest.FixtureRequest, process_group: dist.ProcessGroup) -> Iterator[None]:
    """A test that hangs names the collective that each rank waits in."""
    timer = threading.Timer(TEST_LIMIT, _report_hang, (request.node.nodeid, request.config.stash[_launch_stderr]))
    timer.daemon = True
    timer.start()
    yield
    timer.cancel()
    timer.join()


@pytest.fixture(scope="session", autouse=True)
def unlocked_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Later sessions remove old folders without a lock; Python would give it up on shutting down, left out here."""
    yield
    (tmp_path_factory.getbasetemp() / ".lock").unlink(missing_ok=True)


def _folder_of_all_ranks(factory: pytest.TempPathFactory) -> Path:
    """pytest removes it some sessions later.  Not here: ranks that fail leave at once, and meet no others."""
    paths = [str(factory.mktemp("dmuon")) if RANK == 0 else ""]
    dist.broadcast_object_list(paths, src=0)
    return Path(paths[0])


@pytest.fixture
def folder(process_group: dist.ProcessGroup, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new directory, the same on all ranks."""
    return _folder_of_all_ranks(tmp_path_factory)


@pytest.fixture(scope="module")
def module_folder(process_group: dist.ProcessGroup, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `folder`, for what several tests of a module read."""
    return _folder_of_all_ranks(tmp_path_factory)


@pytest.fixture(scope="session")
def rank() -> int:
    return RANK


@pytest.fixture(scope="session")
def world_size() -> int:
    return WORLD_SIZE


@pytest.fixture(scope="session")
def mesh(
    process_group: dist.ProcessGroup, require_gpus: Callable[[int], None], pytestconfig: pytest.Config
) -> DeviceMesh:
    """All ranks on one axis; with `--on-device cuda` one GPU each."""
    option = pytestconfig.getoption("--on-device")
    device = "cpu" if option == "cpu" else "cuda"
    if device == "cuda":
        require_gpus(1 if option == "shared-gpu" else WORLD_SIZE)
        torch.backends.cuda.matmul.allow_tf32 = False
    return init_device_mesh(device, (WORLD_SIZE,), mesh_dim_names=("shard",))


def _shapes() -> list[tuple[int, int]]:
    """(replicate, shard): all of 4 ranks, one of any other number."""
    shapes = {4: [(2, 2), (1, 4), (4, 1)], 6: [(2, 3)], 8: [(2, 4), (4, 2)]}
    return shapes.get(WORLD_SIZE, [(WORLD_SIZE, 1)])


def _mesh_2d(mesh: DeviceMesh, shape: tuple[int, int]) -> DeviceMesh:
    mesh_2d = init_device_mesh(mesh.device_type, shape, mesh_dim_names=("replicate", "shard"))
    mesh_2d.axes = {name: mesh_2d[name] for name in ("replicate", "shard")}  # the same objects for every test
    return mesh_2d


@pytest.fixture(scope="session", params=_shapes(), ids=lambda shape: f"{shape[0]}x{shape[1]}")
def mesh_2d(mesh: DeviceMesh, request: pytest.FixtureRequest) -> DeviceMesh:
    """(replicate, shard), in every shape the world size allows."""
    return _mesh_2d(mesh, request.param)


@pytest.fixture(scope="session")
def hsdp_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """(replicate, shard), the first of those shapes."""
    return _mesh_2d(mesh, _shapes()[0])
