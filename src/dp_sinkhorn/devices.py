"""Choice of the device to compute on."""

from __future__ import annotations

import torch

from dp_sinkhorn.errors import UserError


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
