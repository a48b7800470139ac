"""Choice of the device, of the number format of the generator, and of the CPU threads, to compute with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

import torch

from dp_sinkhorn.errors import UserError

Precision = Literal["float32", "bfloat16"]

# Below this many pixel values in a step its operations take microseconds each, and handing them to several
# threads costs more than it saves: about the same on an idle machine, up to a hundred times the step on one
# where another process holds a core.
_SMALL_STEP = 20_000


def pick_device(name: str) -> torch.device:
    """The device called `name`; `auto` is a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"device '{name}' cannot be used ({reason}); use auto, cpu or cuda") from None
    return device


def suited_precision(device: torch.device, values: int) -> Precision:
    """The faster format for a generator that makes `values` pixel values in a step.

    bfloat16 where the hardware multiplies it natively: elsewhere it is emulated, and slow. It costs nothing in quality
    that could be measured beside a mechanism's noise (results/paper-loop.json has both formats without noise).
    """
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        # Known since torch 2.11; before that the answer is "no".
        capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
        native = values >= _SMALL_STEP and any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16"))
    return "bfloat16" if native else "float32"


@contextlib.contextmanager
def suited_threads(values: int) -> Iterator[None]:
    """Use one CPU thread while steps of `values` pixel values are computed, if that is few; else leave all."""
    before = torch.get_num_threads()
    if values < _SMALL_STEP:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
