"""What cannot be loaded is refused on every rank, by name, and the live model and optimizer keep every bit."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoints import Run, assert_equal
from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict

import dmuon

pytestmark = pytest.mark.ranks(1, 3)


@pytest.fixture(scope="module")
def run(mesh) -> Run:
    return Run(mesh).train(range(1))


def refused(run: Run, match: str, act: Callable[[], object]) -> None:
    """Raised on every rank, and nothing has changed on any."""
    before = run.masters() | {
        n: p.to_local().clone() for n, p in run.model.named_parameters() if hasattr(p, "to_local")
    }
    before |= {n: b.clone() for n, b in run.model.named_buffers()}
    state = run.optimizer._state
    with pytest.raises(RuntimeError, match=match):
        act()
    after = run.masters() | {n: p.to_local() for n, p in run.model.named_parameters() if hasattr(p, "to_local")}
    assert_equal(after | dict(run.model.named_buffers()), before)
    assert run.optimizer._state is state


def without(state: dict, key: str) -> dict:
    return {k: v for k, v in state.items() if k != key}


MATRIX = "layers.1.down.weight"


def test_keys_and_shapes_of_a_model(run):
    good = run.model.state_dict()
    cases = [
        (without(good, MATRIX), rf"missing keys: '{MATRIX}'"),
        (without(good, "head.bias"), r"missing keys: 'head.bias'"),
        (good | {"layers.9.x": torch.zeros(1)}, r"unexpected keys: 'layers.9.x'"),
        (good | {MATRIX: torch.zeros(10, 8)}, rf"'{MATRIX}' is \[10, 8\], expected \[10, 7\]"),
        (good | {"layers.0.seen": torch.zeros(3)}, r"'layers.0.seen' is \[3\], expected \[2\]"),
        (good | {"head.bias": torch.zeros(61)}, r"'head.bias' is whole, expected cut by .*full_state_dict=True"),
    ]
    for state, match in cases:
        refused(run, match, lambda state=state: run.model.load_state_dict(state))
        refused(run, match, lambda state=state: set_model_state_dict(run.model, state))


def test_not_strict_takes_what_is_there(mesh):
    run, other = Run(mesh), Run(mesh, seed=1)
    state = without(run.model.state_dict(), MATRIX) | {"layers.9.x": torch.zeros(1)}
    kept = other.values()[f"model/{MATRIX}"]
    other.model.load_state_dict(state, strict=False)
    expected = run.values() | {f"model/{MATRIX}": kept}
    assert_equal(
        {k: v for k, v in other.values().items() if k.startswith("model")},
        {k: v for k, v in expected.items() if k.startswith("model")},
    )


def test_one_rank_with_another_state(run, rank, world_size):
    if world_size == 1:
        pytest.skip("needs two ranks")
    good = run.model.state_dict()
    state = good | {MATRIX: torch.zeros(2, 2)} if rank == 1 else good
    refused(run, rf"'{MATRIX}' is \[2, 2\]", lambda: run.model.load_state_dict(state))
    state = without(good, MATRIX) if rank == 1 else good
    refused(run, r"ranks 0 and 1 were given different states", lambda: run.model.load_state_dict(state, strict=False))


def test_states_of_an_optimizer(run):
    index = [run.optimizer._names[p] for p in run.optimizer.param_groups[0]["params"]].index(MATRIX)
    good = run.optimizer.state_dict()

    def changed(**entries: object) -> dict:
        groups = [group | entries if i == 0 else group for i, group in enumerate(good["param_groups"])]
        return good | {"param_groups": groups}

    momentum = good["state"] | {index: {"momentum_buffer": torch.zeros(7, 10)}}
    cases = [
        (changed(format_version=99), r"format version 99.*reads versions 1 to 1"),
        (changed(params=good["param_groups"][0]["params"][:-1]), r"groups .* Muon of \d+ AdamW of \d+; the state has"),
        (changed(use_muon=False), r"use dmuon.import_state"),
        (good | {"state": momentum}, rf"'{MATRIX}.momentum_buffer' is \[7, 10\], expected \[10, 7\]"),
        (
            good | {"state": good["state"] | {index: {"exp_avg": torch.zeros(10, 7)}}},
            r"missing keys: .*momentum_buffer",
        ),
    ]
    for state, match in cases:
        refused(run, match, lambda state=state: run.optimizer.load_state_dict(state))
        refused(run, match, lambda state=state: run.optimizer.load_state_dict(state_dict=state))


def test_model_and_optimizer_together(run):
    """The model's part is fine, the optimizer's is not: neither is changed."""
    state = dmuon.get_state_dict(run.model, run.optimizer)
    state["model"] = {k: torch.ones_like(v) for k, v in state["model"].items()}
    state["optimizer"]["state"][MATRIX] = {"momentum_buffer": torch.zeros(3, 3)}
    refused(
        run, rf"'{MATRIX}.momentum_buffer' is \[3, 3\]", lambda: dmuon.set_state_dict(run.model, run.optimizer, state)
    )


def test_a_parameter_without_state(run):
    state = dmuon.get_state_dict(run.model, run.optimizer)
    del state["optimizer"]["state"][MATRIX]
    refused(run, rf"no optimizer state for {MATRIX}", lambda: dmuon.set_state_dict(run.model, run.optimizer, state))


def on_first(act: Callable[[], object]) -> None:
    if dist.get_rank() == 0:
        act()
    dist.barrier()


def test_directories(run, folder, world_size):
    """Every file missing, cut short or damaged in any byte; another version; not a checkpoint of ours."""
    dmuon.save_checkpoint(folder / "good", run.model, run.optimizer, extra={"step": 1})
    names = sorted(path.name for path in (folder / "good").iterdir())
    assert names == [".metadata", *(f"__{r}_0.distcp" for r in range(world_size)), "dmuon.txt"]
    bad = folder / "bad"

    def check(harm: Callable[[Path], object], match: str) -> None:
        on_first(lambda: (shutil.copytree(folder / "good", bad), harm(bad)))
        refused(run, match, lambda: dmuon.load_checkpoint(bad, run.model, run.optimizer))
        dist.barrier()
        on_first(lambda: shutil.rmtree(bad))

    def flip(path: Path, place: int) -> None:
        data = bytearray(path.read_bytes())
        data[place] ^= 1 << place % 8
        path.write_bytes(data)

    for name in names[:-1]:
        size = (folder / "good" / name).stat().st_size
        check(lambda d, name=name: (d / name).unlink(), rf"file {name} is missing")
        check(
            lambda d, name=name, size=size: (d / name).open("r+b").truncate(size // 2),
            rf"{name} has \d+ bytes, expected {size}",
        )
        for seed in range(6):
            place = random.Random(seed).randrange(size)
            check(lambda d, name=name, place=place: flip(d / name, place), rf"file {name} is damaged")
    check(lambda d: (d / "dmuon.txt").unlink(), r"no readable dmuon.txt: it is incomplete")
    text = (folder / "good" / "dmuon.txt").read_text()
    newer = text.replace("format_version 1", "format_version 2")
    check(lambda d: (d / "dmuon.txt").write_text(newer), r"format version 2, and this dmuon reads versions 1 to 1")
    check(lambda d: (d / "dmuon.txt").write_text(text[:40]), r"no readable dmuon.txt")
    refused(run, r"no readable dmuon.txt", lambda: dmuon.load_checkpoint(folder / "nothing", run.model))
    dmuon.load_checkpoint(folder / "good", run.model, run.optimizer)


def test_a_checkpoint_of_another_model(mesh, run, folder):
    """DCP itself names the keys that the directory lacks; strict=False keeps what it lacks."""
    state = without(dmuon.get_state_dict(run.model)["model"], MATRIX)
    dcp.save({"model": state}, checkpoint_id=folder / ".a.partial")
    run.model._dmuon.rows.native.commit(str(folder / "a"), f"__{dist.get_rank()}_", "")
    refused(run, MATRIX, lambda: dmuon.load_checkpoint(folder / "a", run.model))
    extended = dmuon.get_state_dict(run.model)["model"] | {"layers.9.x": torch.zeros(1)}
    dcp.save({"model": extended}, checkpoint_id=folder / ".b.partial")
    run.model._dmuon.rows.native.commit(str(folder / "b"), f"__{dist.get_rank()}_", "")
    unexpected = r"unexpected keys, which the model lacks: layers.9.x"
    refused(run, unexpected, lambda: dmuon.load_checkpoint(folder / "b", run.model))
    dmuon.load_checkpoint(folder / "b", run.model, strict=False)
    other = Run(mesh, seed=3)
    kept = other.values()[f"model/{MATRIX}"]
    dmuon.load_checkpoint(folder / "a", other.model, strict=False)
    expected = run.values() | {f"model/{MATRIX}": kept}
    assert_equal(
        {k: v for k, v in other.values().items() if k.startswith("model")},
        {k: v for k, v in expected.items() if k.startswith("model")},
    )


def test_an_existing_checkpoint_is_replaced_only_on_request(run, folder):
    dmuon.save_checkpoint(folder / "a", run.model)
    refused(
        run,
        r"exists; choose another name, or pass overwrite=True",
        lambda: dmuon.save_checkpoint(folder / "a", run.model),
    )
    dmuon.save_checkpoint(folder / "a", run.model, run.optimizer, overwrite=True)
    dmuon.load_checkpoint(folder / "a", run.model, run.optimizer)
    assert [path.name for path in folder.iterdir()] == ["a"]


def test_a_model_on_the_meta_device_is_refused(mesh):
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(6, 6, bias=False), torch.nn.Linear(6, 6, bias=False))
    dmuon.dedicate_params(model, mesh, lambda name, p: True)
    with pytest.raises(RuntimeError, match="still on the meta device.*call model.to_empty|another rank"):
        model.state_dict()
    state = {"0.weight": torch.ones(6, 6), "1.weight": torch.ones(6, 6)}
    with pytest.raises(RuntimeError, match="still on the meta device.*call model.to_empty"):
        model.load_state_dict(state)
    model.to_empty(device=mesh.device_type)
    model.load_state_dict(state)
    assert all(bool((p == 1).all()) for p in model.parameters() if not p.is_meta)


def test_optimizer_load_is_refused_with_its_own_name(run):
    state = run.state()["optimizer"]
    state["param_groups"][0]["format_version"] = 7
    refused(
        run, "Muon.load_state_dict.*format version 7", lambda: set_optimizer_state_dict(run.model, run.optimizer, state)
    )
