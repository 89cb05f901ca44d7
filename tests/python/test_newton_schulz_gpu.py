"""Newton-Schulz in a CUDA graph; the numbers themselves are tested in tests/cpp/newton_schulz/gpu_test.cpp."""

import pytest
import torch

import dmuon

SHAPES = [(64, 64), (300, 130), (130, 300), (3, 5)]


def matrices(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return [torch.randn(shape, generator=generator, device="cuda") for shape in SHAPES]


@pytest.mark.gpu(count=1)
def test_a_captured_call_gives_the_bits_of_the_call():
    static = matrices(0)
    for _ in range(2):
        dmuon.newton_schulz(static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = dmuon.newton_schulz(static)
    for seed in (1, 2):
        for to, value in zip(static, matrices(seed), strict=True):
            to.copy_(value)
        graph.replay()
        expected = dmuon.newton_schulz(matrices(seed))
        assert all(torch.equal(x, y) for x, y in zip(captured, expected, strict=True))


@pytest.mark.gpu(count=1)
def test_a_call_never_waits_for_the_gpu():
    inputs = matrices(3)
    dmuon.newton_schulz(inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        dmuon.newton_schulz(inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu(count=1)
@pytest.mark.parametrize("shapes", [SHAPES, [(1024, 1024)] * 16, [(2048, 5632)] * 30, [(4096, 11008), (256, 8)]])
def test_a_step_takes_the_memory_that_it_reports(shapes):
    """At its largest, but for what torch's allocator rounds up to."""
    stepper = torch.classes.dmuon.MuonStepper("gram", 5, "polar_express", "match_rms_adamw")
    tensors = [[torch.randn(shape, device="cuda") for _ in range(3)] for shape in shapes]
    rows = [(str(i), *three) for i, three in enumerate(tensors)]
    for measured in (False, True):  # tables are made in the first one
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        flags = stepper.step(rows, (0.02, 0.95, 0.0, True))
        if measured:
            taken = torch.cuda.max_memory_allocated() - before
            reported = stepper.workspace_bytes(shapes, torch.device("cuda"))
            assert reported <= taken <= reported + 8192, (reported, taken)
        del flags
