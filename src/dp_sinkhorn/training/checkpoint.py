"""Checkpoints: the public state of a run, as safetensors. No pickle, and nothing that saw a record without noise."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dp_sinkhorn.errors import UserError
from dp_sinkhorn.generators import Generator

_GENERATOR, _AVERAGED, _OPTIMIZER, _COMPANION = "generator.", "averaged.", "optimizer.", "companion."
_LEDGER_HEAD = "ledger_head"


def save_checkpoint(
    path: Path,
    generator: Generator,
    averaged: Generator,
    optimizer: torch.optim.Optimizer,
    companion: nn.Module | None,
    ledger_head: str,
) -> None:
    """Write to a file beside it, flush, and move it into place: the old checkpoint stays until the new is whole."""
    tensors = {_GENERATOR + name: tensor for name, tensor in generator.state_dict().items()}
    if averaged is not generator:
        tensors |= {_AVERAGED + name: tensor for name, tensor in averaged.state_dict().items()}
    if companion is not None:
        tensors |= {_COMPANION + name: tensor for name, tensor in companion.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"{_OPTIMIZER}{index}.{name}"] = value
    draft = path.with_suffix(".draft")
    metadata = {_LEDGER_HEAD: ledger_head}
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, draft, metadata)
    with draft.open("rb") as file:
        os.fsync(file.fileno())
    draft.replace(path)


def load_checkpoint(
    path: Path,
    generator: Generator,
    averaged: Generator,
    optimizer: torch.optim.Optimizer,
    companion: nn.Module | None,
) -> str:
    """Put a checkpoint's state into generators, an optimiser and a companion built from the same settings.

    Returns:
        The head of the ledger when the checkpoint was written: what it learnt is paid for in a ledger that knows it.
    """
    try:
        with safe_open(path, framework="pt") as file:
            head = (file.metadata() or {})[_LEDGER_HEAD]
        tensors = load_file(path)
        generator.load_state_dict(_part(tensors, _GENERATOR))
        if averaged is not generator:
            averaged.load_state_dict(_part(tensors, _AVERAGED))
        if companion is not None:
            companion.load_state_dict(_part(tensors, _COMPANION))
        states: dict[int, dict[str, Tensor]] = {}
        for name, value in _part(tensors, _OPTIMIZER).items():
            index, field = name.split(".", 1)
            states.setdefault(int(index), {})[field] = value
        optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})
    except (SafetensorError, OSError, RuntimeError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path}: the checkpoint cannot be used ({reason}); start a new run") from None
    return str(head)


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
