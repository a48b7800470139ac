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
_GRIDS = ((100.0, 1e-4), (2_000.0, 1e-3), (20_000.0, 1e-2))


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
    grid = pld_grid(renyi)
    return renyi if grid is None else _run(PLDAccountant(value_discretization_interval=grid), event, delta)


def pld_grid(renyi_epsilon: float) -> float | None:
    """The grid of the privacy loss for compositions of about this ε; None where none is practical."""
    return next((grid for limit, grid in _GRIDS if renyi_epsilon <= limit), None)


class _OrdersLeftOut(logging.Filter):
    """Keeps quiet about Rényi orders that the accountant cannot evaluate: fewer orders still give a valid bound."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "_compute_log_a_frac failed to converge" not in str(record.msg)


logging.getLogger("absl").addFilter(_OrdersLeftOut())


def _run(accountant: PrivacyAccountant, event: dp_accounting.DpEvent, delta: float) -> float:
    return float(accountant.compose(event).get_epsilon(delta))
