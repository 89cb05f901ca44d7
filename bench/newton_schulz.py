"""Newton-Schulz engines side by side on one GPU: dmuon as called and in a CUDA graph, torch compiled and eager.

    python bench/newton_schulz.py
    python bench/newton_schulz.py --shapes 1x1024x1024,16x2048x7168 --json result.json

Five steps on bf16 Gaussian matrices.  `eager` is the plain loop, `fused` the same with addmm.  `called` is back-to-back
calls from Python, host time included; `graph` is the replay of a CUDA graph of the same call.  `plain` is dmuon's path
for GPUs without kernels of their own, which fp64 input takes on every GPU (also in fp16).  `gns` is Gram Newton-Schulz
with its quack kernels, where the package `gram_newton_schulz` is installed.

A round is one sample of about `--sample-ms` of each engine, and the median over the rounds is printed; engines take
turns in an order drawn for each round, because what has just run sets the clock of a chip that power limits.  `floor`
is the time of the exact triangles of the cheaper algorithm at the rate of an 8192^3 product, measured right after the
sweep: a chip that is hot runs slower.  Before anything is timed, each engine's result is compared with the fp32
iteration of its own coefficients.
"""

import argparse
import json
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

import dmuon

DEFAULT_SHAPES = (
    "1x1024x1024,16x1024x1024,1x2048x2048,16x2048x2048,16x2048x7168,"
    "1x2048x5632,1x4096x4096,1x4096x11008,1x4096x14336,1x8192x28672"
)
KELLER_JORDAN = (3.4445, -4.7750, 2.0315)


def standard(x: torch.Tensor) -> torch.Tensor:
    """The plain loop of Jordan et al. 2024: [batch, n, m], n <= m."""
    a, b, c = KELLER_JORDAN
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def standard_fused(x: torch.Tensor) -> torch.Tensor:
    """The same with the sums fused into cuBLAS's products."""
    a, b, c = KELLER_JORDAN
    add_product = torch.addmm if len(x) == 1 else torch.baddbmm
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    x = x[0] if len(x) == 1 else x
    for _ in range(5):
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def reference(x: torch.Tensor, coefficients: str) -> torch.Tensor:
    """The first matrix's iteration, in fp32."""
    steps = torch.ops.dmuon.newton_schulz
    return steps([x[0].float().cpu()], "standard", 5, coefficients)[0].to(x.device)


@dataclass
class Engine:
    name: str
    call: Callable[[], object]
    samples: list[float] = field(default_factory=list)
    calls: int = 1

    def sample(self, calls: int) -> float:
        """Milliseconds a call."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            self.call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / calls

    def warm_up(self, sample_ms: float) -> None:
        for _ in range(3):
            self.call()
        self.calls = max(1, int(sample_ms / self.sample(3)))


def graphed(call: Callable[[], object]) -> Callable[[], object]:
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def engines_for(x: torch.Tensor) -> list[Engine]:
    matrices = list(x.unbind())

    doubles = [matrix.double() for matrix in matrices]

    def ours() -> list[torch.Tensor]:
        return dmuon.newton_schulz(matrices)

    torch._dynamo.reset()
    compiled = torch.compile(standard, dynamic=False)
    engines = [
        Engine("dmuon called", ours),
        Engine("dmuon graph", graphed(ours)),
        Engine("plain called", lambda: dmuon.newton_schulz(doubles)),
        Engine("compiled called", lambda: compiled(x)),
        Engine("eager called", lambda: standard(x)),
        Engine("eager graph", graphed(lambda: standard(x))),
        Engine("fused graph", graphed(lambda: standard_fused(x))),
    ]
    try:
        from gram_newton_schulz import GramNewtonSchulz
    except ImportError:
        return engines
    gns = GramNewtonSchulz()
    return [*engines, Engine("gns called", lambda: gns(x))]


def check(x: torch.Tensor) -> dict[str, float]:
    def error(found: torch.Tensor, expected: torch.Tensor) -> float:
        return float((found.float() - expected).norm() / expected.norm())

    expected = reference(x, "polar_express")
    return {
        "dmuon": error(dmuon.newton_schulz(list(x.unbind()))[0], expected),
        "plain": error(dmuon.newton_schulz(list(x.double().unbind()))[0], expected),
        "eager": error(standard(x)[0], reference(x, "keller_jordan")),
    }


def triangle_flops(batch: int, n: int, m: int) -> float:
    """Exact triangles, five steps: standard for nearly square matrices, else Gram with one restart."""
    if m < 1.3 * n:
        return batch * 5 * (3 * m * n**2 + n**3)
    return batch * (6 * m * n**2 + 14 * n**3)


def product_rate() -> float:
    """FLOP/s of an 8192^3 bf16 product, median of 10."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    engine = Engine("product", lambda: a @ b)
    engine.warm_up(5.0)
    return 2 * 8192**3 / (statistics.median(engine.sample(3) for _ in range(10)) * 1e-3)


def measure(shape: str, rounds: int, sample_ms: float) -> dict[str, object]:
    batch, n, m = map(int, shape.split("x"))
    torch.manual_seed(0)
    x = torch.randn(batch, n, m, device="cuda", dtype=torch.bfloat16)
    errors = check(x) if n * m <= 2**25 else {}
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    dmuon.newton_schulz(list(x.unbind()))
    peak = torch.cuda.max_memory_allocated() - before
    engines = engines_for(x)
    for engine in engines:
        engine.warm_up(sample_ms)
    for i in range(rounds):
        for engine in random.Random(i).sample(engines, len(engines)):
            engine.samples.append(engine.sample(engine.calls))
    times = {engine.name: statistics.median(engine.samples) for engine in engines}
    flops = triangle_flops(batch, n, m)
    return {"shape": shape, "ms": times, "errors": errors, "peak_bytes": peak, "triangle_flops": flops}


def report(results: list[dict], rate: float) -> None:
    names = list(results[0]["ms"])
    print(f"8192^3 product right after the sweep: {rate / 1e12:.0f} TFLOP/s")
    print(f"{'batch x n x m':>16} " + " ".join(f"{name:>16}" for name in names) + f" {'floor':>8} {'share':>6}")
    for result in results:
        floor = result["triangle_flops"] / rate * 1e3
        row = " ".join(f"{result['ms'][name]:16.3f}" for name in names)
        print(f"{result['shape']:>16} {row} {floor:8.3f} {floor / result['ms']['dmuon graph']:6.1%}")
    for name in names:
        ratios = [result["ms"][name] / result["ms"]["dmuon called"] for result in results]
        print(f"{name} / dmuon called, geometric mean: {statistics.geometric_mean(ratios):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=DEFAULT_SHAPES, help="batch x n x m, comma separated")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sample-ms", type=float, default=4.0)
    parser.add_argument("--json", help="write everything there too")
    args = parser.parse_args()
    results = [measure(shape, args.rounds, args.sample_ms) for shape in args.shapes.split(",")]
    rate = product_rate()
    report(results, rate)
    for result in results:
        print(result["shape"], "errors", result["errors"], f"peak {result['peak_bytes'] / 2**30:.3f} GiB")
    if args.json:
        setup = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name(), "product_flops": rate}
        with open(args.json, "w") as file:
            json.dump({"setup": setup, "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
