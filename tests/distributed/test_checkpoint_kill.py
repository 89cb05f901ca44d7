"""kill -9 of a rank at random moments of a save: what was saved before loads, and the rest is whole or refused."""

import multiprocessing
import os
import random
import sys
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import killed_save
import pytest
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint import CheckpointException

import dmuon

pytestmark = pytest.mark.ranks(1)

WORLD = 2
KILLS = 4
"""In each test; 36 in all."""

Reader = tuple[nn.Module, dmuon.Muon]


@pytest.fixture(scope="module")
def reader(mesh) -> Reader:
    return killed_save.build()


@pytest.fixture(scope="module")
def forks() -> Iterator[multiprocessing.context.BaseContext]:
    """Starts ranks in milliseconds: they are forked from a process that has imported torch and dmuon."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["killed_save"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # of that process
        yield context


def saved_steps(folder: Path) -> int:
    saved = folder / "saved"
    return int(saved.read_text()) if saved.exists() else 0


def kill_in_a_save(forks, folder: Path, kind: str, dice: random.Random) -> int:
    """Returns a step that was known to be saved when a rank was killed; then the others are stopped too."""
    for leftover in ("store", "saved"):
        (folder / leftover).unlink(missing_ok=True)
    ranks: list[BaseProcess] = [
        forks.Process(target=killed_save.run, args=(rank, WORLD, str(folder), kind)) for rank in range(WORLD)
    ]
    for process in ranks:
        process.start()
    try:
        deadline = time.monotonic() + 180
        while saved_steps(folder) < 1:
            assert time.monotonic() < deadline and all(process.is_alive() for process in ranks), "nothing was saved"
            time.sleep(0.005)
        time.sleep(0.15 * dice.random())
        sure = saved_steps(folder)
        ranks[dice.randrange(WORLD)].kill()
        time.sleep(0.1 * dice.random())
        return sure
    finally:
        for process in ranks:
            process.kill()
            process.join()


def the_step_of(values: set[int], path: Path) -> int:
    assert len(values) == 1, f"{path} mixes the steps {sorted(values)}"
    return values.pop()


def load_with_dmuon(reader: Reader, path: Path) -> int:
    """The step that all values of the checkpoint say."""
    model, optimizer = reader
    killed_save.set_all(model, optimizer, 0)
    dmuon.load_checkpoint(path, model, optimizer)
    tensors = [t for p in model.parameters() for t in (p, optimizer.state[p]["momentum_buffer"])]
    return the_step_of({int(v) for t in tensors for v in t.unique()}, path)


def load_with_torch(reader: Reader, path: Path) -> int:
    killed_save.set_all(*reader, 0)
    state = dmuon.get_state_dict(*reader)
    dcp.load(state, checkpoint_id=path)
    weights = [value.full_tensor() for value in state["model"].values()]
    momentum = [value["momentum_buffer"].full_tensor() for value in state["optimizer"]["state"].values()]
    return the_step_of({int(v) for t in weights + momentum for v in t.unique()}, path)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["dmuon", "replace", "torch"])
def test_kill_9_in_a_save(reader, forks, folder, kind, seed):
    dice = random.Random(f"{kind} {seed}")
    for number in range(KILLS):
        here = folder if kind == "replace" else folder / str(number)  # "replace": runs on over what was left behind
        here.mkdir(exist_ok=True)
        sure = kill_in_a_save(forks, here, kind, dice)
        if kind == "replace":
            assert load_with_dmuon(reader, here / "last") >= sure
            continue
        load = load_with_torch if kind == "torch" else load_with_dmuon
        assert load(reader, here / f"{sure:04d}") == sure
        for path in (path for path in here.glob("[0-9]*") if int(path.name) > sure):
            whole = kind == "dmuon" or (path / ".metadata").exists()
            if whole:
                assert load(reader, path) == int(path.name)
            else:
                with pytest.raises(CheckpointException) as refusal:
                    load(reader, path)
                assert "metadata" in str(refusal.value.failures[0][0])
