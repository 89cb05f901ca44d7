"""Which calls of a module are running."""

import math
import sys

import torch.nn as nn

_CALL = nn.Module._call_impl.__code__


def running_calls(module: nn.Module) -> float:
    """How many calls of `module` are on the stacks of this process's threads; infinity where compiled code hides it."""
    count = 0
    for top in sys._current_frames().values():
        frame = top
        while frame is not None:
            code = frame.f_code
            if code.co_name.startswith("torch_dynamo_resume"):
                return math.inf
            if (code.co_name, code.co_filename) == (_CALL.co_name, _CALL.co_filename):
                count += frame.f_locals.get("self") is module
            frame = frame.f_back
    return count
