"""What bench/scaling_model.py predicts: bytes and times against sums made by hand, plan and memory of a small model."""

import pytest
import scaling_model
import scaling_report
from hypothesis import given, settings
from hypothesis import strategies as st
from scaling_model import Constants, ModelSizes, Shape
from step_time import PRESETS

MB = 1e6
"""Elements; GB/s and milliseconds then give round numbers."""


def constants(**changed) -> Constants:
    values = {"forward_ms": 20.0, "backward_ms": 40.0, "adamw_compute_ms": 50.0, "rest_ms": 8.0, "adamw_ms": 16.0}
    return Constants(**values | {"link_gb": 100.0, "node_gb": 10.0, "node": 4} | changed)


@pytest.mark.parametrize(
    ("text", "shape", "ranks"),
    [("1", Shape(1), 1), ("8", Shape(8), 8), ("2x4", Shape(4, 2), 8), ("1x2", Shape(2, 1), 2)],
)
def test_a_mesh_is_replicas_times_ranks_of_a_replica(text, shape, ranks):
    assert scaling_model.parse_shape(text) == shape
    assert str(shape) == text
    assert shape.ranks == ranks


@pytest.mark.parametrize("text", ["", "0", "2x", "2x4x1", "-1", "axb"])
def test_another_mesh_is_an_error_that_says_what_was_expected(text):
    with pytest.raises(ValueError, match="RANKS, as 8, or REPLICATExSHARD, as 2x4"):
        scaling_model.parse_shape(text)


def test_meshes_of_a_number_of_ranks():
    assert list(map(str, scaling_model.all_shapes(8))) == ["8", "2x4", "4x2", "8x1"]
    assert list(map(str, scaling_model.all_shapes(1))) == ["1"]
    predicted = {ranks: list(map(str, scaling_model.predicted_shapes(ranks, node=8))) for ranks in (1, 4, 8, 12, 64)}
    assert predicted == {1: ["1"], 4: ["4"], 8: ["8", "2x4"], 12: ["12", "2x6"], 64: ["64", "8x8"]}


def test_bytes_of_two_replicas_of_four_ranks():
    """1000 elements: 3 of 4 ranks of each replica receive in bf16, and send gradients in fp32."""
    owned = scaling_model.owned_bytes(Shape(4, 2), 1000, gathers=2)
    assert owned == {"gather": 24_000, "reduce": 24_000, "replicate_reduce": 4_000, "publish": 2_000}
    assert scaling_model.owned_bytes(Shape(4, 2), 1000, gathers=1, sent=2)["reduce"] == 12_000
    sharded = scaling_model.sharded_bytes(Shape(4, 2), 1000, gathers=2)
    assert sharded == owned | {"replicate_reduce": 8_000, "publish": 0}


@settings(deadline=None)
@given(st.integers(1, 16), st.integers(1, 16), st.integers(1, 10**9))
def test_one_rank_sends_nothing_and_one_replica_publishes_nothing(shard, replicas, elements):
    assert not any(scaling_model.owned_bytes(Shape(1), elements, 2).values())
    one = scaling_model.owned_bytes(Shape(shard, 1), elements, 2)
    assert one == scaling_model.owned_bytes(Shape(shard), elements, 2)
    several = scaling_model.owned_bytes(Shape(shard, replicas), elements, 2)
    assert several["gather"] == replicas * one["gather"] and several["publish"] == (replicas - 1) * elements * 2


def test_an_axis_that_leaves_the_node_is_slow():
    gb = constants().axis_gb
    assert gb(Shape(4)) == gb(Shape(2, 2)) == (100.0, 100.0)
    assert gb(Shape(4, 2)) == (100.0, 10.0)
    assert gb(Shape(8)) == (10.0, 10.0)


def test_time_on_the_wire():
    """8 ranks: 800 MB on the shard axes are 100 MB a rank, 1 ms at 100 GB/s; across nodes 10 GB/s."""
    traffic = {"gather": 600 * MB, "reduce": 200 * MB, "replicate_reduce": 80 * MB, "publish": 160 * MB}
    assert scaling_model.wire_ms(Shape(4, 2), traffic, constants()) == pytest.approx((1.0 + 1.0, 2.0))


@pytest.mark.parametrize(
    ("hidden", "under", "ends", "exposed"), [(5, 9, 1, 1), (12, 9, 1, 3), (0, 9, 0, 0), (9, 0, 2, 9)]
)
def test_exposed_is_the_ends_and_what_compute_does_not_cover(hidden, under, ends, exposed):
    assert scaling_model.exposed_ms(hidden, under, ends) == exposed


SIZES = ModelSizes([("a", 100, 1000, "0"), ("b", 100, 1000, "1")], rest=100_000, layers=2)


def test_a_step_of_one_rank_is_compute_and_optimizer():
    step = scaling_model.predict_steps(Shape(1), SIZES, "z3", 7.0, constants())
    assert step["exposed_ms"] == step["adamw_exposed_ms"] == 0
    assert step["step_ms"] == 20 + 40 + 7 + 8
    assert step["adamw_step_ms"] == 50 + 16


def test_a_step_of_two_ranks():
    """In all (z3): 300,000 elements, gathered twice in bf16 and reduced in fp32, 8 bytes, half of it a rank: 1.2 MB.
    The ends: 200,000 elements, 6 bytes: 0.6 MB.  At 0.01 GB/s 120 ms and 60 ms; of the 60 ms between, compute covers
    all of Muon's and 50 ms of AdamW's.
    """
    step = scaling_model.predict_steps(Shape(2), SIZES, "z3", 7.0, constants(link_gb=0.01))
    assert step["exposed_ms"] == pytest.approx(60)
    assert step["step_ms"] == pytest.approx(60 + 60 + 7 + 8 / 2)
    assert step["adamw_exposed_ms"] == pytest.approx(60 + 10)
    assert step["adamw_step_ms"] == pytest.approx(50 + 70 + 16 / 2)


def test_publishes_lie_under_the_update_and_the_next_forward():
    """2x1, z2: nothing is gathered.  Across replicas fp32 sums: 200,000 + 2 x 100,000 elements, half of it a rank,
    0.8 MB; the ends 100,000 + 2 x 100,000, 0.6 MB.  Publishes 200,000 elements in bf16, half a rank: 0.2 MB.
    At 0.002 GB/s: 400, 300 and 100 ms.
    """
    step = scaling_model.predict_steps(Shape(1, 2), SIZES, "z2", 7.0, constants(node=1, node_gb=0.002))
    assert step["exposed_ms"] == pytest.approx(300 + (400 - 300 - 60) + (100 - 7 - 20))


def test_balance():
    assert scaling_model.balance([1.0, 3.0]) == {"owner_ms": [1.0, 3.0], "largest_ms": 3.0, "max_over_mean": 1.5}
    assert scaling_model.balance([0.0])["max_over_mean"] == 1.0


def test_more_ranks_than_matrices_leave_owners_without_one():
    """Seven small matrices a layer are one unit, so two owners have all: each 4 x 64 x 64 + 3 x 64 x 128 elements."""
    layer = 4 * 64 * 64 + 3 * 64 * 128
    row = scaling_model.predict(Shape(4, 2), PRESETS["tiny"], "z3", None)
    assert row["without_matrix"] == 6
    assert row["max_over_mean"] == pytest.approx(4)
    assert row["state_bytes"] == 8 * layer
    assert row["resident_bytes"] == (8 + 2) * layer
    assert row["peak_bytes"] > row["resident_bytes"]
    assert row["wire_bytes"]["gather"] == 2 * 2 * 3 * 2 * layer * 2 / 8
    assert "step_ms" not in row


def figures(step: float, optimizer: float) -> dict:
    return {"forward_ms": step / 3, "backward_ms": step / 2, "optimizer_ms": optimizer, "step_ms": step}


def measured(mesh: str, ranks: int, step: float, gb: float | None) -> dict:
    contenders = {"adamw_z3": figures(step, 2.0), "muon_z3_root": figures(2 * step, 9.0)}
    owners = {"measured": {"owner_ms": [5.0] * ranks, "largest_ms": 5.0}}
    return {
        "mesh": mesh,
        "ranks": ranks,
        "gb_per_second": {"shard": gb},
        "tokens": {"16x2": {"contenders": contenders}},
        "dmuon": {"muon_z3_root": {"owners": owners}},
    }


def test_constants_come_from_the_fewest_ranks_and_the_fastest_axis():
    rows = [measured("4", 4, 60.0, 300.0), measured("2x1", 2, 60.0, 200.0), measured("2", 2, 120.0, 100.0)]
    found = scaling_report.find_constants(rows, "16x2", "z3", (None, 50.0), 8)
    assert (found.forward_ms, found.backward_ms, found.adamw_compute_ms) == (80.0, 120.0, 100.0)
    assert (found.rest_ms, found.adamw_ms) == (2 * (9 - 5), 2 * 2)  # two ranks share what FSDP2 keeps
    assert (found.link_gb, found.node_gb) == (300.0, 50.0)
    assert "mesh 2," in found.sources["adamw_ms"]
    assert scaling_report.find_constants(rows, "16x2", "z2", (None, 50.0), 8) is None
    assert scaling_report.find_constants([measured("1", 1, 60.0, None)], "16x2", "z3", (None, 50.0), 8) is None


def test_a_measurement_stands_next_to_the_prediction_of_its_mesh_and_mode():
    row = scaling_report.attach_measured({"mesh": "2", "mode": "z3"}, [measured("2", 2, 6.0, 1.0)], "16x2")
    assert row["measured"]["muon_z3_root"] == {"step_ms": 12.0, "largest_ms": 5.0}
    assert row["measured"]["adamw_z3"] == {"step_ms": 6.0, "largest_ms": None}
    other = scaling_report.attach_measured({"mesh": "2", "mode": "z2"}, [measured("2", 2, 6.0, 1.0)], "16x2")
    assert other["measured"] == {}
