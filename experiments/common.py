"""What the experiments share."""

from __future__ import annotations

import subprocess

import torch


def commit() -> str:
    """The checkout's commit."""
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()


def device_name(device: torch.device) -> str:
    """The device as results name it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {torch.get_num_threads()} threads"
