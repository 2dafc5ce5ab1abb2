"""Kernels of a decode step that are launched before the one in front of them has ended (programmatic dependent launch).

Such a step is some hundred kernels of a few microseconds each. One that is launched so comes onto the processors as
soon as those of the kernel before it leave them, and waits there (`gdc_wait`) until that has ended and its results can
be seen: most of the time between two kernels is hidden. Every program waits before it reads or writes anything but
weights, which never change, and lets the next kernel's in only then; so what is two kernels away has ended too. A
kernel of many short programs loses by it where each waits first, and gains where its weights are on their way before it
waits (`gemv`: a step of Llama-3.1-8B 4.37 ms not launched early, 4.72 waiting first, 4.23 reading first).

Who comes early takes the places that there are. Programs of a product that several of share a processor crowd where
others have just ended, and stay there: as many as fit on some processors, none on the rest. So what is in front of
such products, and takes longer than a launch, lets them in at its end, when all places are free: a step of weights of
4 bits, 64 rows, 7.72 ms in front of products let in at once, 6.79 ms at the end; 16 rows 3.58 and 3.34 (H200).

NVIDIA, "CUDA C++ Programming Guide", Programmatic Dependent Launch and Synchronization; from compute capability 9.0 on.
"""

from __future__ import annotations

import os
from functools import cache

import torch
import triton
import triton.language as tl


@cache
def launches_early(device: torch.device) -> bool:
    """Whether kernels on this device may be launched so: their IS_EARLY, and `launch_pdl`."""
    if device.type != "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9


@triton.jit
def wait_for_earlier(IS_EARLY: tl.constexpr, LETS_IN: tl.constexpr = True):
    """Before all else in a kernel that is launched so. IS_EARLY: `launches_early`. LETS_IN: the next one's programs, as
    soon as all of this one's have been here; else that is still to be done (`let_next_in`)."""
    if IS_EARLY:
        tl.extra.cuda.gdc_wait()
        if LETS_IN:
            tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def let_next_in(IS_EARLY: tl.constexpr):
    """The next kernel's programs come once each of this one's has been here, or has ended."""
    if IS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
