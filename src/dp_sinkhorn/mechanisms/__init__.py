"""The barrier: mechanisms, the private randomness they draw, and the registry of their names."""

from __future__ import annotations

from typing import TypeVar

from dp_sinkhorn.errors import UserError
from dp_sinkhorn.mechanisms.barrier import Barrier
from dp_sinkhorn.mechanisms.base import GeneratedBatch, ImageGradient, Mechanism, ParameterGradient, SanitisedGradient
from dp_sinkhorn.mechanisms.clipping import clip_rows, clip_whole
from dp_sinkhorn.mechanisms.per_record import PerRecordMechanism
from dp_sinkhorn.mechanisms.randomness import OsEntropy, Randomness, SeededForDebugging
from dp_sinkhorn.mechanisms.sinkhorn import (
    BatchMechanism,
    NonPrivateMechanism,
    ParameterMechanism,
    RowMechanism,
)

MechanismType = TypeVar("MechanismType", bound=type[Mechanism])

_REGISTRY: dict[str, type[Mechanism]] = {}


def register_mechanism(mechanism: MechanismType) -> MechanismType:
    """Make a mechanism known by its name; usable as a class decorator."""
    _REGISTRY[mechanism.name] = mechanism
    return mechanism


def mechanism_class(name: str) -> type[Mechanism]:
    """The mechanism of that name."""
    if name not in _REGISTRY:
        raise UserError(f"unknown mechanism '{name}'; choose one of {', '.join(sorted(_REGISTRY))}")
    return _REGISTRY[name]


for _mechanism in (PerRecordMechanism, RowMechanism, BatchMechanism, ParameterMechanism, NonPrivateMechanism):
    register_mechanism(_mechanism)

__all__ = [
    "Barrier",
    "BatchMechanism",
    "GeneratedBatch",
    "ImageGradient",
    "Mechanism",
    "NonPrivateMechanism",
    "OsEntropy",
    "ParameterGradient",
    "ParameterMechanism",
    "PerRecordMechanism",
    "Randomness",
    "RowMechanism",
    "SanitisedGradient",
    "SeededForDebugging",
    "clip_rows",
    "clip_whole",
    "mechanism_class",
    "register_mechanism",
]
