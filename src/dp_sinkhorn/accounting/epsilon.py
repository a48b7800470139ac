"""ε of a composition of events, by Rényi DP or by privacy loss distributions."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import lru_cache
from typing import Literal

import dp_accounting
from dp_accounting import PrivacyAccountant
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

Accountant = Literal["pld", "rdp"]

# (largest Rényi ε, grid of the privacy loss): a coarse grid is a valid, slightly larger bound, and what it
# adds is negligible beside the ε of its line. It keeps the accountant fast where ε, and the grid with it, is huge.
_GRIDS = ((1.0, 1e-5), (100.0, 1e-4), (2_000.0, 1e-3), (20_000.0, 1e-2))

# Millions of steps of next to no loss take the grid a minute, for a few per cent of an ε below 1.
_MANY = 2_000_000


def compose(parts: Iterable[tuple[dp_accounting.DpEvent, int]]) -> dp_accounting.DpEvent:
    """One event for `count` releases of each of several events."""
    return dp_accounting.ComposedDpEvent(
        tuple(dp_accounting.SelfComposedDpEvent(event, count) for event, count in parts if count > 0)
    )


@lru_cache(maxsize=256)
def epsilon_of(event: dp_accounting.DpEvent, delta: float, accountant: Accountant = "pld") -> float:
    """The smallest ε that the accountant can prove for (ε, delta)-DP; infinite without protection.

    Both accountants are upper bounds. `pld` is the tighter one, on a grid fine enough for its size; beyond
    ε = 20,000, where no grid is practical and nothing is protected anyway, it returns the Rényi bound.
    """
    renyi = _run(RdpAccountant(), event, delta)
    if accountant == "rdp":
        return renyi
    grid = pld_grid(renyi) if renyi >= 1.0 or _count(event) <= _MANY else None
    if grid is None:
        return renyi
    # The smaller of two upper bounds: over many steps of next to no loss the grid can cost more than Rényi's slack.
    return min(renyi, _run(PLDAccountant(value_discretization_interval=grid), event, delta))


def pld_grid(renyi_epsilon: float) -> float | None:
    """The grid of the privacy loss for compositions of about this ε; None where none is practical."""
    return next((grid for limit, grid in _GRIDS if renyi_epsilon <= limit), None)


def _count(event: dp_accounting.DpEvent) -> int:
    """How many releases a composition holds."""
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        return int(event.count) * _count(event.event)
    if isinstance(event, dp_accounting.ComposedDpEvent):
        return sum(_count(part) for part in event.events)
    return 1


class _Harmless(logging.Filter):
    """Keeps quiet about what does not touch the bound.

    Rényi orders that cannot be evaluated are left out, and fewer orders still give a valid bound; a divergence of
    −1e-14, at noise so large that a search only passes it, is a rounded zero.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        message = str(record.msg)
        return "_compute_log_a_frac failed to converge" not in message and "Negative Renyi divergence" not in message


logging.getLogger("absl").addFilter(_Harmless())


def _run(accountant: PrivacyAccountant, event: dp_accounting.DpEvent, delta: float) -> float:
    return float(accountant.compose(event).get_epsilon(delta))
