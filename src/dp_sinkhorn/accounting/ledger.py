"""The ledger: releases are written down before they happen.

Training reserves releases in blocks. A reservation is checked against the budget, appended to the file and
flushed to disk before the first of its releases; after a crash the whole block counts as spent, so the ledger
can count too much but never too little. A run that stops in good order settles its last block: the line says
how much of it was used, and only that counts.

The file is JSON, one entry a line, each with a checksum chained to the line before:

    {"reserve": {"event": {...}, "count": 100}, "sum": "..."}
    {"settle": {"entry": 0, "used": 37}, "sum": "..."}

A line torn by a crash can only be the last. Its reservation never took effect (releases wait for the flush),
so it is dropped; anything else that does not check out is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import attr
import dp_accounting

from dp_sinkhorn.accounting.epsilon import Accountant, compose, epsilon_of
from dp_sinkhorn.errors import BudgetExceededError, UserError

try:
    import fcntl
except ImportError:  # not on Windows; runs are then not protected against a second process
    fcntl = None  # type: ignore[assignment]

# Target ε is met when the accountant's figure is below it up to this relative rounding of the target itself.
_SLACK = 1e-9


@dataclass(frozen=True)
class Budget:
    """The most that a run may spend. `epsilon=None` sets no limit."""

    epsilon: float | None
    delta: float
    accountant: Accountant = "pld"


@dataclass
class Allowance:
    """Releases that the ledger has written down and that may now happen."""

    entry: int
    count: int
    used: int = 0

    def take(self) -> None:
        """Use one release; raises when none is left."""
        if self.used >= self.count:
            raise RuntimeError(f"all {self.count} reserved releases have been used; reserve more in the ledger")
        self.used += 1


@dataclass
class _Entry:
    event: dp_accounting.DpEvent
    count: int


@dataclass
class Ledger:
    """The account of one run.

    Attributes:
        budget: what may be spent.
        path: file to keep; None keeps the account in memory, for fits that cannot be resumed.
    """

    budget: Budget
    path: Path | None = None
    _entries: list[_Entry] = field(default_factory=list, init=False, repr=False)
    _file: IO[bytes] | None = field(default=None, init=False, repr=False)
    _sum: str = field(default="", init=False, repr=False)

    def __post_init__(self) -> None:
        if self.path is not None:
            self._open(self.path)

    @property
    def releases(self) -> int:
        """How many releases are accounted for."""
        return sum(entry.count for entry in self._entries)

    def parts(self) -> list[tuple[dp_accounting.DpEvent, int]]:
        """Distinct events with the number of releases of each, in order of first use."""
        totals: list[tuple[dp_accounting.DpEvent, int]] = []
        for entry in self._entries:
            for k, (event, count) in enumerate(totals):
                if event == entry.event:
                    totals[k] = (event, count + entry.count)
                    break
            else:
                totals.append((entry.event, entry.count))
        return [(event, count) for event, count in totals if count > 0]

    def epsilon(self) -> float:
        """ε spent so far at the budget's δ."""
        return epsilon_of(compose(self.parts()), self.budget.delta, self.budget.accountant)

    def reserve(self, event: dp_accounting.DpEvent, count: int) -> Allowance:
        """Write down `count` releases of `event` that are about to happen.

        Raises:
            BudgetExceededError: they would pass the target ε; nothing is written.
        """
        if count < 1:
            raise ValueError(f"a reservation needs at least one release, got {count}")
        if self.budget.epsilon is not None:
            after = compose([*self.parts(), (event, count)])
            epsilon = epsilon_of(after, self.budget.delta, self.budget.accountant)
            if not epsilon <= self.budget.epsilon * (1.0 + _SLACK):
                raise BudgetExceededError(
                    f"{count} more releases would spend epsilon={epsilon:.6g} at delta={self.budget.delta:g}, "
                    f"over the budget of {self.budget.epsilon:.6g}; nothing was released"
                )
        self._append({"reserve": {"event": encode_event(event), "count": count}})
        self._entries.append(_Entry(event, count))
        return Allowance(len(self._entries) - 1, count)

    def settle(self, allowance: Allowance) -> None:
        """Record that an allowance will not be used further; what it left is not spent."""
        if allowance.used < allowance.count:
            self._append({"settle": {"entry": allowance.entry, "used": allowance.used}})
            self._entries[allowance.entry].count = allowance.used
            allowance.count = allowance.used

    def close(self) -> None:
        """Release the file, and the lock on it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, path: Path) -> None:
        created = not path.exists()
        self._file = path.open("a+b")
        if fcntl is not None:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                self.close()
                raise UserError(f"{path}: another process is using this run; wait for it or stop it") from None
        self._file.seek(0)
        content = self._file.read()
        complete, _, torn = content.rpartition(b"\n")
        for number, line in enumerate(complete.split(b"\n") if complete else [], start=1):
            self._replay(line, f"{path}:{number}")
        if torn:
            self._file.truncate(len(content) - len(torn))
            os.fsync(self._file.fileno())
        if created:
            _sync_folder(path.parent)

    def _replay(self, line: bytes, where: str) -> None:
        try:
            entry = json.loads(line)
            checksum = entry.pop("sum")
            if checksum != _chain(self._sum, entry):
                raise ValueError
            if "reserve" in entry:
                self._entries.append(_Entry(decode_event(entry["reserve"]["event"]), int(entry["reserve"]["count"])))
            else:
                settled = self._entries[entry["settle"]["entry"]]
                settled.count = min(settled.count, int(entry["settle"]["used"]))
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            raise UserError(
                f"{where}: the ledger is damaged, so what was spent is not known; restore it from a backup"
            ) from None
        self._sum = checksum

    def _append(self, entry: dict[str, Any]) -> None:
        checksum = _chain(self._sum, entry)
        if self._file is not None:
            size = self._file.seek(0, os.SEEK_END)
            try:
                self._file.write(json.dumps({**entry, "sum": checksum}).encode() + b"\n")
                self._file.flush()
                os.fsync(self._file.fileno())
            except OSError as error:
                self._file.truncate(size)  # a full disk must not leave half a line for the next one to follow
                raise UserError(
                    f"{self.path}: the ledger cannot be written ({error.strerror}); free some space"
                ) from None
        self._sum = checksum


def encode_event(event: dp_accounting.DpEvent) -> dict[str, Any]:
    """A `DpEvent` as JSON: its class name with its fields."""

    def value(item: Any) -> Any:
        if isinstance(item, dp_accounting.DpEvent):
            return encode_event(item)
        if isinstance(item, (list, tuple)):
            return [value(part) for part in item]
        return item if isinstance(item, int | str) else float(item)

    fields = {attribute.name: value(getattr(event, attribute.name)) for attribute in attr.fields(type(event))}
    return {"type": type(event).__name__, **fields}


def decode_event(encoded: dict[str, Any]) -> dp_accounting.DpEvent:
    """The inverse of `encode_event`, for the event classes of `dp_accounting` and no other."""
    fields = dict(encoded)
    event_class = getattr(dp_accounting, fields.pop("type"))
    if not issubclass(event_class, dp_accounting.DpEvent):
        raise ValueError("not an event")

    def value(item: Any) -> Any:
        if isinstance(item, dict):
            return decode_event(item)
        return [value(part) for part in item] if isinstance(item, list) else item

    return event_class(**{name: value(item) for name, item in fields.items()})


def _chain(previous: str, entry: dict[str, Any]) -> str:
    return hashlib.sha256((previous + json.dumps(entry, sort_keys=True)).encode()).hexdigest()


def _sync_folder(folder: Path) -> None:
    """Make a new file's name durable, where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
