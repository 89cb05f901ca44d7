"""The Muon step of one owner on one device, without communication: time, and where it goes on the GPU.

    python bench/muon_step.py --preset 3b --ranks 2

The owner has the matrices of every `--ranks`-th layer of a preset of step_time.py, with random gradients and momentum
in fp32.  Printed are the median and the fastest of `--samples` samples of about `--sample-ms` of steps back to back (a
hot chip is slower), and by torch's profiler each kernel's time and what the passes before and after Newton-Schulz move.
"""

import argparse
import statistics
from collections.abc import Callable

import torch
import torch.nn as nn
from llama import Llama
from newton_schulz import Engine
from step_time import PRESETS
from torch.profiler import ProfilerActivity, profile

PASS_BYTES = {"accumulate": 12, "scale_cast": 10, "update": 10}
"""Of an element: fp32 gradient, momentum and weight, fp16 direction."""
HYPER = (0.02, 0.95, 0.1, True)


def owned_shapes(preset: str, ranks: int) -> list[torch.Size]:
    with torch.device("meta"):
        layers = Llama(PRESETS[preset]).layers
    return [m.weight.shape for layer in layers[::ranks] for m in layer.modules() if isinstance(m, nn.Linear)]


def kernel_times(step: Callable[[], object], steps: int = 3) -> dict[str, float]:
    """Milliseconds a step, by kernel."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    averages = [e for e in found.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    return {e.key.split("(anonymous namespace)::")[-1].split("<")[0].split("(")[0]: e.device_time_total * 1e-3 / steps
            for e in averages}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="1b")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--samples", type=int, default=11)
    parser.add_argument("--sample-ms", type=float, default=100.0)
    args = parser.parse_args()
    torch.manual_seed(0)
    shapes = owned_shapes(args.preset, args.ranks)
    rows = [(str(i), *(torch.randn(shape, device="cuda") for _ in range(3))) for i, shape in enumerate(shapes)]
    stepper = torch.classes.dmuon.MuonStepper("gram", 5, "polar_express", "match_rms_adamw")
    engine = Engine("step", lambda: stepper.step(rows, HYPER))
    engine.warm_up(args.sample_ms)
    samples = [engine.sample(engine.calls) for _ in range(args.samples)]
    numel = sum(shape.numel() for shape in shapes)
    print(f"{len(shapes)} matrices, {numel / 1e9:.3f} B elements, {torch.cuda.get_device_name()}, {torch.__version__}")
    print(f"step: median {statistics.median(samples):.3f} ms, fastest {min(samples):.3f} ms")
    for name, ms in kernel_times(engine.call).items():
        moved = f", {numel * PASS_BYTES[name] / ms * 1e-6:.0f} GB/s" if name in PASS_BYTES else ""
        print(f"{name}: {ms:.3f} ms{moved}")


if __name__ == "__main__":
    main()
