"""How bench/step_profile.py reads a profile: interval arithmetic, exposed communication, gaps, phases."""

import time
from types import SimpleNamespace

import intervals
import pytest
import step_profile
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from step_profile import PHASES, Kernel, Recording
from torch.autograd import DeviceType

PHASE_SPANS = {"forward": (0.0, 20.0), "backward": (20.0, 50.0), "optimizer": (50.0, 60.0)}
spans = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda s: (s[0], s[0] + s[1])), max_size=12)
kernels = st.lists(
    st.builds(
        lambda name, start, duration, stream: Kernel(name, start, start + duration, stream, start - 1),
        st.sampled_from(["gemm", "norm", "ncclDevKernel_AllGather", "Memcpy PtoP (Device -> Device)"]),
        st.integers(1, 60),
        st.integers(1, 9),
        st.integers(7, 9),
    ),
    max_size=20,
)


def cells(some: intervals.Spans) -> set[int]:
    """The same with integer ends, as unit cells."""
    return {cell for start, end in some for cell in range(int(start), int(end))}


@settings(deadline=None)
@given(spans)
def test_union_is_disjoint_ordered_and_covers_the_same(some):
    merged = intervals.union(some)
    assert cells(merged) == cells(some)
    assert intervals.length(some) == len(cells(some))
    assert all(end < start for (_, end), (start, _) in zip(merged, merged[1:], strict=False))
    assert intervals.union(merged) == merged


@settings(deadline=None)
@given(spans, spans)
def test_intersection_and_exposed_agree_with_sets(a, b):
    assert cells(intervals.intersection(a, b)) == cells(a) & cells(b)
    assert intervals.exposed(a, b) == len(cells(a) - cells(b))
    assert 0 <= intervals.exposed(a, b) <= intervals.length(a)
    assert intervals.exposed(a, a) == 0
    assert intervals.exposed(a, []) == intervals.length(a)


@settings(deadline=None)
@given(kernels)
def test_summary_adds_up(some):
    summary = step_profile.summarize(Recording(some, PHASE_SPANS, []))
    assert 0 <= summary["exposed_communication_ms"] <= summary["communication_ms"] <= summary["busy_ms"]
    assert summary["busy_ms"] == pytest.approx(summary["compute_ms"] + summary["exposed_communication_ms"])
    assert summary["span_ms"] == pytest.approx(summary["busy_ms"] + summary["idle_ms"])
    assert summary["compute_kernels"] + summary["communication_kernels"] == len(some)
    assert sum(p["kernels"] for p in summary["phases"].values()) == len(some)
    assert sum(s["kernels"] for s in summary["streams"].values()) == len(some)
    assert step_profile.describe(summary)


@settings(deadline=None)
@given(kernels)
def test_gaps_and_kernels_fill_the_compute_stream(some):
    found = step_profile.gaps(Recording(some, PHASE_SPANS, []))
    stream = step_profile.compute_stream(some, step_profile.COMMUNICATION)
    mine = [k.span for k in some if k.stream == stream]
    whole = max((e for _, e in mine), default=0) - min((s for s, _ in mine), default=0)
    assert sum(g["ms"] for g in found) + intervals.length(mine) / 1e3 == pytest.approx(whole / 1e3)
    assert [g["ms"] for g in found] == sorted((g["ms"] for g in found), reverse=True)
    assert all(0 <= g["communication_ms"] <= g["ms"] for g in found)


def test_a_gap_names_its_neighbours_and_its_cause():
    some = [
        Kernel("gemm", 10, 30, 7, 5),
        Kernel("inner", 12, 14, 7, 6),
        Kernel("ncclDevKernel_ReduceScatter", 25, 38, 9, 20),
        Kernel("add", 42, 50, 7, 41),
        Kernel("norm", 51, 52, 7, 49),
    ]
    first, second = step_profile.gaps(Recording(some, PHASE_SPANS, []))
    assert (first["before"], first["after"], first["phase"]) == ("gemm", "add", "backward")
    assert (first["ms"], first["at_ms"], first["communication_ms"]) == pytest.approx((0.012, 0.020, 0.008))
    assert first["host_late_ms"] == pytest.approx(0.011)  # launched 11 us after the stream ran dry
    assert second["host_late_ms"] < 0  # launched in time: it waited for something else
    assert step_profile.summarize(Recording(some, PHASE_SPANS, []))["exposed_communication_ms"] == pytest.approx(0.008)


def event(name, start, end, device=DeviceType.CPU, ident=0, **more):
    return SimpleNamespace(
        name=name,
        time_range=SimpleNamespace(start=start, end=end),
        device_type=device,
        id=ident,
        device_resource_id=more.get("stream", 7),
        is_user_annotation=more.get("annotation", False),
    )


def test_only_what_the_step_launched_is_read():
    gpu = DeviceType.CUDA
    events = [
        event("cudaLaunchKernel", -9, -8, ident=1),
        event("ncclDevKernel_AllReduce", 1, 2, gpu, ident=1),  # the barrier before the step, run late
        event("cuLaunchKernelEx", 3, 4, ident=2),
        event("gemm", 70, 75, gpu, ident=2, stream=9),  # launched in forward, run after the host was done
        event("forward", 70, 75, gpu, ident=2, annotation=True),
        event("aten::mm", 3, 5, ident=3),
        event("unlaunched", 30, 31, gpu, ident=3),
        event("cudaStreamSynchronize", 21, 29),
        event("cudaMemcpyAsync", 22, 23),
        event("cudaDeviceSynchronize", 61, 69),
    ]
    recording = step_profile.read(events, PHASE_SPANS)
    assert recording.kernels == [Kernel("unlaunched", 30, 31, 7, None), Kernel("gemm", 70, 75, 9, 3)]
    assert recording.left_out == 1
    phases = step_profile.summarize(recording)["phases"]
    assert [phases[name]["kernels"] for name in PHASES] == [1, 1, 0]
    assert [phases[name]["synchronising_calls"] for name in PHASES] == [{}, {"cudaStreamSynchronize": 1}, {}]
    assert phases["backward"]["synchronising_calls_ms"] == pytest.approx(0.008)


def test_host_phases_and_profile_share_a_clock(monkeypatch):
    """The phases, which time.time_ns tells, lie among the profiler's events; loosely, for busy machines."""
    monkeypatch.setattr(dist, "barrier", lambda: None)
    seen = []

    def read(events, phases):
        seen.append(({e.name: step_profile.span(e) for e in events}, phases))

    monkeypatch.setattr(step_profile, "read", read)

    def step():
        times = []
        for name in PHASES:
            times.append(time.time_ns())
            with torch.profiler.record_function(name):
                time.sleep(0.01)
        times.append(time.time_ns())
        return {name: (times[i], times[i + 1]) for i, name in enumerate(PHASES)}

    step_profile.record(step, "cpu")
    ((events, phases),) = seen
    for name in PHASES:
        assert events[name] == pytest.approx(phases[name], abs=5e5)
