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
