"""What the demo measures about a run on one rank, and how."""

import resource
import time
from collections.abc import Callable

import torch


class TrainingClock:
    """Seconds spent inside `with clock:`; start-up and validation stay outside."""

    def __init__(self, device: torch.device) -> None:
        self.seconds = 0.0
        self._on_gpu = device.type == "cuda"
        self._since = 0.0

    def __enter__(self) -> None:
        self._since = self._now()

    def __exit__(self, *_: object) -> None:
        self.seconds += self._now() - self._since

    def _now(self) -> float:
        if self._on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()


class StepperClock:
    """Stands before a Muon optimizer's C++ stepper and measures what its calls cost this rank.

    CPU: CPU time of the calling thread, because the wall time of ranks that share cores would measure the scheduler
    (every rank computes with one thread).  CUDA: time between two events on the stream.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple] = []
        self._stepper = optimizer._stepper
        optimizer._stepper = self

    def step(self, *arguments: object) -> object:
        begin = self._mark()
        result = self._stepper.step(*arguments)
        self._marks.append((begin, self._mark()))
        return result

    def _mark(self) -> "float | torch.cuda.Event":
        if not self._on_gpu:
            return time.thread_time()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def mean_ms(self, steps: int) -> float:
        """Per training step, over all but the first two of `steps`, which allocate."""
        warm = self._marks[2 * len(self._marks) // steps :]
        if self._on_gpu:
            torch.cuda.synchronize()
            total = sum(begin.elapsed_time(end) for begin, end in warm)
        else:
            total = 1e3 * sum(end - begin for begin, end in warm)
        return total / max(1, steps - 2)


class PeakMemory:
    """CUDA: most bytes allocated at once.  CPU: growth of the process's peak resident set since this was made."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._start = 0 if self._on_gpu else _peak_resident()

    def bytes(self) -> int:
        return torch.cuda.max_memory_allocated() if self._on_gpu else _peak_resident() - self._start


def _peak_resident() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def watch_own_memory(model: torch.nn.Module) -> Callable[[], dict[str, int]]:
    """Starts counting what dmuon itself holds; the result says what the plan predicted and what the worst moment was.

    Counted: masters, momentum, copies, gather and reduce buffers, gradients of matrices.
    """
    from dmuon import memory_report

    memory_report(model, track=True)

    def peak() -> dict[str, int]:
        report = memory_report(model)
        predicted = max(report.predicted_forward_peak, report.predicted_backward_peak)
        return {"predicted": predicted, "counted": report.peak + report.predicted_momentum}

    return peak
