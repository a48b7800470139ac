"""Accounting: what releases cost, how to plan for a budget, and the ledger that keeps count.

All figures come from the accountants of `dp_accounting`; this package only chooses their settings. The
neighbouring relation is everywhere adding or removing one record.
"""

from dp_sinkhorn.accounting.epsilon import Accountant, compose, epsilon_of
from dp_sinkhorn.accounting.ledger import Allowance, Budget, Ledger, decode_event, encode_event
from dp_sinkhorn.accounting.planning import solve_noise, solve_steps

__all__ = [
    "Accountant",
    "Allowance",
    "Budget",
    "Ledger",
    "compose",
    "decode_event",
    "encode_event",
    "epsilon_of",
    "solve_noise",
    "solve_steps",
]
