"""Checkpoints: the public state of a run, as safetensors. No pickle, and nothing that saw a record without noise."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dp_sinkhorn.errors import UserError
from dp_sinkhorn.generators import Generator

_GENERATOR, _OPTIMIZER = "generator.", "optimizer."


def save_checkpoint(path: Path, generator: Generator, optimizer: torch.optim.Optimizer) -> None:
    """Write to a file beside it, flush, and move it into place: the old checkpoint stays until the new is whole."""
    tensors = {_GENERATOR + name: tensor for name, tensor in generator.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"{_OPTIMIZER}{index}.{name}"] = value
    draft = path.with_suffix(".draft")
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, draft)
    with draft.open("rb") as file:
        os.fsync(file.fileno())
    draft.replace(path)


def load_checkpoint(path: Path, generator: Generator, optimizer: torch.optim.Optimizer) -> None:
    """Put a checkpoint's state into a generator and an optimiser built from the same settings."""
    try:
        tensors = load_file(path)
        weights = {
            name.removeprefix(_GENERATOR): value for name, value in tensors.items() if name.startswith(_GENERATOR)
        }
        generator.load_state_dict(weights)
        states: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            if name.startswith(_OPTIMIZER):
                index, field = name.removeprefix(_OPTIMIZER).split(".", 1)
                states.setdefault(int(index), {})[field] = value
        optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path}: the checkpoint cannot be used ({reason}); start a new run") from None
