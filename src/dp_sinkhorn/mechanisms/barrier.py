"""The privacy barrier as the training loop sees it.

A `Barrier` joins a mechanism, the records, the source of private randomness and the ledger. Its only way out
is `release`, which takes from an allowance that the ledger has written down and checked against the budget
before: a step that was not paid for cannot be taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dp_sinkhorn.errors import BudgetExceededError
from dp_sinkhorn.mechanisms.base import GeneratedBatch, Mechanism, SanitisedGradient
from dp_sinkhorn.records.private import PrivateRecords

if TYPE_CHECKING:
    from dp_sinkhorn.accounting.ledger import Allowance, Ledger
    from dp_sinkhorn.mechanisms.randomness import Randomness


class Barrier:
    """A mechanism over private records, with a ledger in front of it."""

    def __init__(self, mechanism: Mechanism, records: PrivateRecords, randomness: Randomness, ledger: Ledger) -> None:
        self.__mechanism = mechanism
        self.__ledger = ledger
        self.__records = records
        self.__randomness = randomness
        self.__allowance: Allowance | None = None

    @property
    def mechanism(self) -> Mechanism:
        """The mechanism; a plain value that holds no record."""
        return self.__mechanism

    @property
    def ledger(self) -> Ledger:
        """What has been spent."""
        return self.__ledger

    def fits(self, count: int) -> bool:
        """Whether the budget allows `count` more releases. Asked once for all of a run, it makes reservations cheap."""
        try:
            self.ledger.check(self.mechanism.event, count)
        except BudgetExceededError:
            return False
        return True

    def reserve(self, count: int) -> None:
        """Write `count` releases into the ledger, or raise `BudgetExceededError` and write nothing."""
        self.settle()
        self.__allowance = self.ledger.reserve(self.mechanism.event, count)

    def release(self, batch: GeneratedBatch) -> SanitisedGradient:
        """Answer the mechanism's query once. At least one reserved release must be left."""
        if self.__allowance is None:
            raise RuntimeError("no release has been reserved in the ledger")
        self.__allowance.take(self.mechanism.event)
        return self.mechanism.release(batch, self.__records, self.__randomness)

    def settle(self) -> None:
        """Give back to the ledger what was reserved and not used."""
        if self.__allowance is not None:
            self.ledger.settle(self.__allowance)
            self.__allowance = None
