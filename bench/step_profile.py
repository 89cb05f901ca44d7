"""Where the time of one training step goes, from the events of torch.profiler; used by step_time.py --profile.

Times in `Recording` are microseconds on the profiler's clock; `summarize` gives milliseconds.
"""

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from intervals import Span, Spans, exposed, intersection, length
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

PHASES = ("forward", "backward", "optimizer")
COMMUNICATION = r"nccl|Memcpy PtoP|multimem|symm_mem|one_shot|two_shot|signal_kernel|barrier_kernel"
"""Names of NCCL's kernels, of copies between GPUs, and of torch's symmetric memory."""
SYNCHRONISING = re.compile(
    r"(cuda(Stream|Device|Event)|cu(Stream|Ctx|Event))Synchronize|cudaMemcpy|cudaMalloc|cudaFree|cudaHostAlloc"
)
RUNTIME_CALL = re.compile(r"cu(da)?[A-Z]")
WAITS = {"Stream Wait Event", "Stream Sync", "Event Sync", "Context Sync"}
HostSpans = dict[str, tuple[int, int]]
"""By phase, in nanoseconds since 1970 (time.time_ns)."""


@dataclass(frozen=True)
class Kernel:
    """A kernel, copy or fill on the device.  `launched`: when the host began to launch it, if that is known."""

    name: str
    start: float
    end: float
    stream: int
    launched: float | None

    @property
    def span(self) -> Span:
        return self.start, self.end

    @property
    def when(self) -> float:
        return self.start if self.launched is None else self.launched


@dataclass
class Recording:
    """One step.  `phases`: host spans of PHASES.  `calls`: runtime calls that may make the host wait.  `left_out`:
    kernels of the profile that were launched before or after the step; more than a barrier's means that the clocks of
    the host and the profiler differ.
    """

    kernels: list[Kernel]
    phases: dict[str, Span]
    calls: list[tuple[str, Span]]
    left_out: int = 0

    def phase(self, moment: float) -> str:
        """The host's phase at that moment, or the one that it came from."""
        begun = [name for name, (start, _) in self.phases.items() if start <= moment]
        return begun[-1] if begun else PHASES[0]


def read(events: Iterable[Any], phases: dict[str, Span]) -> Recording:
    """Of `profile.events()`, what the host launched in the phases: host spans of PHASES on the profiler's clock."""
    events = list(events)
    host = [e for e in events if e.device_type == DeviceType.CPU]
    first, last = phases[PHASES[0]][0], phases[PHASES[-1]][1]
    launches = {e.id: e.time_range.start for e in host if RUNTIME_CALL.match(e.name)}
    kernels = [Kernel(e.name, *span(e), e.device_resource_id, launches.get(e.id)) for e in events if on_device(e)]
    inside = sorted((k for k in kernels if first <= k.when <= last), key=lambda k: k.span)
    calls = [(e.name, span(e)) for e in host if SYNCHRONISING.fullmatch(e.name) and first <= e.time_range.start <= last]
    return Recording(inside, phases, calls, len(kernels) - len(inside))


def span(event: Any) -> Span:
    return event.time_range.start, event.time_range.end


def on_device(event: Any) -> bool:
    """Work on the device; not a range that only names some of it, nor a wait."""
    return event.device_type == DeviceType.CUDA and not event.is_user_annotation and event.name not in WAITS


def record(step: Callable[[], HostSpans], device: str, trace: Path | None = None) -> Recording:
    """Collective.  Profiles the second of two calls; all ranks enter it together, so that none waits for a profiler.

    On GPUs only the device and the runtime calls are recorded, because recording every operator slows the host down.
    A chrome trace, if asked for, has the operators.
    """
    activities = [ProfilerActivity.CUDA] if device == "cuda" else [ProfilerActivity.CPU]
    if trace is not None:
        activities = [ProfilerActivity.CPU, *(a for a in activities if a != ProfilerActivity.CPU)]
    for _ in range(2):
        with profile(activities=activities, acc_events=True) as profiler:
            dist.barrier()
            synchronise(device)
            spans = step()
            synchronise(device)
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    origin = profiler.profiler.kineto_results.trace_start_ns()
    phases = {name: ((start - origin) / 1e3, (end - origin) / 1e3) for name, (start, end) in spans.items()}
    return read(profiler.events(), phases)


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def synchronisation_warnings(step: Callable[[], object], device: str) -> int:
    """How often torch's own check sees a step make the host wait for the GPU."""
    if device != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(w.message) for w in seen)


def spans_of(kernels: Iterable[Kernel]) -> Spans:
    return [k.span for k in kernels]


def split(kernels: list[Kernel], pattern: str) -> tuple[list[Kernel], list[Kernel]]:
    """Communication, whose names match, and compute: everything else, copies included."""
    matches = re.compile(pattern).search
    return [k for k in kernels if matches(k.name)], [k for k in kernels if not matches(k.name)]


def summarize(recording: Recording, pattern: str = COMMUNICATION, gap_count: int = 10) -> dict[str, Any]:
    """Milliseconds.  Exposed: some communication kernel runs, and no compute kernel on any stream."""
    communication, compute = split(recording.kernels, pattern)
    everything = spans_of(recording.kernels)
    whole = (max(e for _, e in everything) - min(s for s, _ in everything)) if everything else 0.0
    return {
        "span_ms": whole / 1e3,
        "busy_ms": length(everything) / 1e3,
        "idle_ms": (whole - length(everything)) / 1e3,
        "compute_ms": length(spans_of(compute)) / 1e3,
        "communication_ms": length(spans_of(communication)) / 1e3,
        "exposed_communication_ms": exposed(spans_of(communication), spans_of(compute)) / 1e3,
        "compute_kernels": len(compute),
        "communication_kernels": len(communication),
        "kernels_left_out": recording.left_out,
        "phases": {name: phase_summary(recording, name, pattern) for name in PHASES},
        "streams": stream_summary(recording.kernels, pattern),
        "longest_kernels": longest_kernels(recording.kernels),
        "gaps": gaps(recording, pattern)[:gap_count],
    }


def phase_summary(recording: Recording, phase: str, pattern: str) -> dict[str, Any]:
    """Of what the host launched in the phase, whenever the device ran it."""
    start, end = recording.phases[phase]
    mine = [k for k in recording.kernels if recording.phase(k.when) == phase]
    communication, _ = split(mine, pattern)
    _, all_compute = split(recording.kernels, pattern)
    calls = [(name, length([s])) for name, s in recording.calls if recording.phase(s[0]) == phase]
    return {
        "host_ms": (end - start) / 1e3,
        "kernels": len(mine),
        "busy_ms": length(spans_of(mine)) / 1e3,
        "communication_ms": length(spans_of(communication)) / 1e3,
        "exposed_communication_ms": exposed(spans_of(communication), spans_of(all_compute)) / 1e3,
        "synchronising_calls": dict(Counter(name for name, _ in calls)),
        "synchronising_calls_ms": sum(duration for _, duration in calls) / 1e3,
    }


def stream_summary(kernels: list[Kernel], pattern: str) -> dict[str, dict[str, Any]]:
    """By stream, busiest first: copies that the pattern does not know as communication show up here."""
    rows = {}
    for stream in {k.stream for k in kernels}:
        mine = [k for k in kernels if k.stream == stream]
        communication, _ = split(mine, pattern)
        rows[str(stream)] = {
            "kernels": len(mine),
            "busy_ms": length(spans_of(mine)) / 1e3,
            "communication_ms": length(spans_of(communication)) / 1e3,
            "copies": sum("Memcpy" in k.name for k in mine),
        }
    return dict(sorted(rows.items(), key=lambda row: -row[1]["busy_ms"]))


def longest_kernels(kernels: list[Kernel], count: int = 12) -> list[dict[str, Any]]:
    """By name, the largest sums first."""
    total: Counter[str] = Counter()
    for k in kernels:
        total[k.name] += k.end - k.start
    calls = Counter(k.name for k in kernels)
    return [{"name": n, "kernels": calls[n], "ms": t / 1e3} for n, t in total.most_common(count)]


def compute_stream(kernels: list[Kernel], pattern: str) -> int | None:
    """The stream with the most compute; None without any."""
    _, compute = split(kernels, pattern)
    streams = {k.stream for k in compute}
    return max(streams, key=lambda s: (length(spans_of(k for k in compute if k.stream == s)), -s), default=None)


def gaps(recording: Recording, pattern: str = COMMUNICATION) -> list[dict[str, Any]]:
    """Times when nothing runs on the compute stream, the longest first, with the kernels around them.

    communication_ms: of it, with communication on another stream.  host_late_ms: from the gap's begin until the host
    began to launch the kernel after it; positive when the stream ran dry because the host was late, None if not known.
    """
    stream = compute_stream(recording.kernels, pattern)
    communication = spans_of(split(recording.kernels, pattern)[0])
    mine = sorted((k for k in recording.kernels if k.stream == stream), key=lambda k: k.span)
    found = []
    before = mine[0] if mine else None
    for after in mine[1:]:
        if after.start > before.end:
            found.append(
                {
                    "ms": (after.start - before.end) / 1e3,
                    "at_ms": (before.end - mine[0].start) / 1e3,
                    "phase": recording.phase(after.when),
                    "before": before.name,
                    "after": after.name,
                    "communication_ms": length(intersection([(before.end, after.start)], communication)) / 1e3,
                    "host_late_ms": None if after.launched is None else (after.launched - before.end) / 1e3,
                }
            )
        before = max(before, after, key=lambda k: k.end)
    return sorted(found, key=lambda gap: -gap["ms"])


def shorten(name: str, width: int = 58) -> str:
    name = re.sub(r"^void |at::native::|\(anonymous namespace\)::", "", name)
    return name if len(name) <= width else name[: width - 3] + "..."


def describe(summary: dict[str, Any]) -> str:
    """For people; milliseconds."""
    lines = [
        "device: span {span_ms:.2f}, busy {busy_ms:.2f}, idle {idle_ms:.2f} ms; compute {compute_ms:.2f} ms in "
        "{compute_kernels} kernels; communication {communication_ms:.2f} ms in {communication_kernels}, of it exposed "
        "{exposed_communication_ms:.2f} ms; {kernels_left_out} kernels outside the step".format(**summary),
        "launched in    host ms   kernels   busy ms   comm ms   exposed   synchronising calls",
    ]
    for name, p in summary["phases"].items():
        calls = ", ".join(f"{n} x {c}" for c, n in p["synchronising_calls"].items()) or "none"
        lines.append(
            f"{name:<12} {p['host_ms']:>9.2f} {p['kernels']:>9} {p['busy_ms']:>9.2f} {p['communication_ms']:>9.2f} "
            f"{p['exposed_communication_ms']:>9.2f}   {calls} ({p['synchronising_calls_ms']:.2f} ms)"
        )
    for stream, s in summary["streams"].items():
        lines.append(
            f"stream {stream}: {s['kernels']} kernels, busy {s['busy_ms']:.2f} ms, of it communication "
            f"{s['communication_ms']:.2f} ms; {s['copies']} copies"
        )
    lines.append("longest kernels, ms in all")
    lines += [f"{k['ms']:>9.2f}  {k['kernels']:>5} x {shorten(k['name'], 90)}" for k in summary["longest_kernels"]]
    lines.append("longest gaps on the compute stream: ms, at ms, of it communication, host late by")
    for g in summary["gaps"]:
        late = "     ?" if g["host_late_ms"] is None else f"{g['host_late_ms']:>6.2f}"
        lines.append(
            f"{g['ms']:>9.3f} {g['at_ms']:>8.2f} {g['communication_ms']:>6.2f} {late} {g['phase']:<9} "
            f"{shorten(g['before'])} -> {shorten(g['after'])}"
        )
    return "\n".join(lines)
