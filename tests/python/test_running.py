"""How many calls of a module run, on all threads."""

import math
import threading

import pytest
import torch
import torch.nn as nn

from dmuon._running import running_calls


class Counting(nn.Module):
    """Calls itself so many times, and counts in the innermost call."""

    def __init__(self, count) -> None:
        super().__init__()
        self.count = count

    def forward(self, depth: int) -> float:
        return self(depth - 1) if depth > 1 else self.count(self)


def test_calls_of_this_module_alone_are_counted():
    model = Counting(running_calls)
    around = nn.Sequential(model)
    assert running_calls(model) == 0
    assert [model(depth) for depth in (1, 2, 5)] == [1, 2, 5]
    assert Counting(lambda _: running_calls(model))(3) == 0
    model.count = lambda _: running_calls(around)
    assert around(2) == 1


def test_calls_that_an_exception_has_ended_are_not_counted():
    def stop(_: nn.Module) -> None:
        raise KeyboardInterrupt

    model = Counting(stop)
    try:
        model(3)
    except KeyboardInterrupt:
        assert running_calls(model) == 0
    else:
        pytest.fail("nothing was raised")


def test_calls_of_other_threads_are_counted():
    began, go_on = threading.Event(), threading.Event()

    def wait(_: nn.Module) -> float:
        began.set()
        assert go_on.wait(60)
        return 0.0

    model = Counting(wait)
    thread = threading.Thread(target=model, args=(2,))
    thread.start()
    assert began.wait(60)
    assert running_calls(model) == 2
    go_on.set()
    thread.join()
    assert running_calls(model) == 0


def test_compiled_calls_are_counted_or_given_up():
    model = Counting(torch.compiler.disable(running_calls))
    model.compile(backend="eager")
    assert model(1) in (1, math.inf)
