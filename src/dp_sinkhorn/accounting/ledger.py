"""The ledger: releases are written down before they happen.

Training reserves releases in blocks. A reservation is checked against the budget, appended to the file and
flushed to disk before the first of its releases; after a crash the whole block counts as spent, so the ledger
can count too much but never too little. A run that stops in good order settles its last block: the line says
how much of it was used, and only that counts.

The file is JSON, one entry a line, each with a checksum chained to the line before:

    {"run": "checksum of the run's settings", "sum": "..."}
    {"reserve": {"event": {...}, "count": 100}, "sum": "..."}
    {"settle": {"entry": 0, "used": 37}, "sum": "..."}

A line torn by a crash can only be the last. Its reservation never took effect (releases wait for the flush),
so it is dropped; anything else that does not check out is refused. A shortened or older file checks out by
itself, so checkpoints and releases carry the checksum of the ledger they belong to, and resuming asks `knows` for it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

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
    """Releases of one event that the ledger has written down and that may now happen, in this process."""

    entry: int
    event: dp_accounting.DpEvent
    count: int
    used: int = 0
    process: int = field(default_factory=os.getpid)

    def take(self, event: dp_accounting.DpEvent) -> None:
        """Use one release of `event`; raises when none is left, or when it is not what was reserved."""
        if event != self.event:
            raise RuntimeError(f"the ledger has reserved {self.event}, not {event}")
        if os.getpid() != self.process:
            raise RuntimeError("the releases were reserved by another process and belong to it")
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
        run: checksum of the settings that the releases are made with. It is the file's first line, and a file that
            begins with another is refused: settings may not change under a ledger.
    """

    budget: Budget
    path: Path | None = None
    run: str | None = None
    _entries: list[_Entry] = field(default_factory=list, init=False, repr=False)
    _fitting: list[tuple[dp_accounting.DpEvent, int]] = field(default_factory=list, init=False, repr=False)
    _file: FileIO | None = field(default=None, init=False, repr=False)
    _sums: list[str] = field(default_factory=lambda: [""], init=False, repr=False)
    _closed: bool = field(default=False, init=False, repr=False)
    _process: int = field(default_factory=os.getpid, init=False, repr=False)
    _stored_run: str | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.path is not None:
            self._open(self.path)
        if self.run is not None:
            self._claim(self.run)

    @property
    def head(self) -> str:
        """The checksum of the last entry, which vouches for all before it."""
        return self._sums[-1]

    def knows(self, head: str) -> bool:
        """Whether the ledger once ended with this checksum: it holds everything that was written until then."""
        return head in self._sums

    @property
    def releases(self) -> int:
        """How many releases are accounted for."""
        return sum(entry.count for entry in self._entries)

    def parts(self) -> list[tuple[dp_accounting.DpEvent, int]]:
        """Distinct events with the number of releases of each, in order of first use."""
        return _totals((entry.event, entry.count) for entry in self._entries)

    def epsilon(self) -> float:
        """ε spent so far at the budget's δ."""
        return epsilon_of(compose(self.parts()), self.budget.delta, self.budget.accountant)

    def check(self, event: dp_accounting.DpEvent, count: int) -> None:
        """Raise `BudgetExceededError` if `count` more releases of `event` would pass the target ε.

        What was found to fit stays known: fewer releases of the same events cannot cost more. A run that checks
        all its steps once asks the accountant no more.
        """
        after = _totals([*self.parts(), (event, count)])
        if self.budget.epsilon is None or _covers(self._fitting, after):
            return
        epsilon = epsilon_of(compose(after), self.budget.delta, self.budget.accountant)
        if not epsilon <= self.budget.epsilon * (1.0 + _SLACK):
            raise BudgetExceededError(
                f"{count} more releases would spend epsilon={epsilon:.6g} at delta={self.budget.delta:g}, "
                f"over the budget of {self.budget.epsilon:.6g}; nothing was released"
            )
        self._fitting = after

    def reserve(self, event: dp_accounting.DpEvent, count: int) -> Allowance:
        """Write down `count` releases of `event` that are about to happen.

        Raises:
            BudgetExceededError: they would pass the target ε; nothing is written.
        """
        if count < 1:
            raise ValueError(f"a reservation needs at least one release, got {count}")
        self.check(event, count)
        self._append({"reserve": {"event": encode_event(event), "count": count}})
        self._entries.append(_Entry(event, count))
        return Allowance(len(self._entries) - 1, event, count)

    def settle(self, allowance: Allowance) -> None:
        """Record that an allowance will not be used further; what it left is not spent."""
        if allowance.used < allowance.count:
            # Closed first: whatever happens to the write, nothing more can be taken from what it gives back.
            allowance.count = allowance.used
            self._append({"settle": {"entry": allowance.entry, "used": allowance.used}})
            self._entries[allowance.entry].count = allowance.used

    def close(self) -> None:
        """Release the file, and the lock on it. Nothing can be reserved after that."""
        self._closed = True
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, path: Path) -> None:
        self._file = path.open("a+b", buffering=0)
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
        if torn and self._is_next(torn):
            # Whole but for its line end, which an editor may have stripped: it counts.
            self._replay(torn, f"{path}:last line")
            self._write(b"\n")
        elif torn:
            self._file.truncate(len(content) - len(torn))
            os.fsync(self._file.fileno())
        if not content:
            _sync_folder(path.parent)

    def _claim(self, run: str) -> None:
        """Write whose ledger this is into an empty one; refuse that of another."""
        if self._stored_run is None and not self._entries:
            self._append({"run": run})
            self._stored_run = run
        elif self._stored_run != run:
            self.close()
            raise UserError(
                f"{self.path}: was begun with other settings than those beside it, which must not change in a run; "
                "put the run's own settings.json back, or start a new run"
            )

    def _replay(self, line: bytes, where: str) -> None:
        try:
            entry = json.loads(line)
            checksum = entry.pop("sum")
            if checksum != _chain(self.head, entry):
                raise ValueError
            if "run" in entry:
                if len(self._sums) > 1:
                    raise ValueError
                self._stored_run = str(entry["run"])
            elif "reserve" in entry:
                self._entries.append(_Entry(decode_event(entry["reserve"]["event"]), int(entry["reserve"]["count"])))
            else:
                settled = self._entries[entry["settle"]["entry"]]
                settled.count = min(settled.count, int(entry["settle"]["used"]))
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            raise UserError(
                f"{where}: the ledger is damaged, so what was spent is not known; the run cannot go on"
            ) from None
        self._sums.append(checksum)

    def _is_next(self, line: bytes) -> bool:
        """Whether a line without an end is a whole entry that follows the last one."""
        try:
            entry = json.loads(line)
            return bool(entry.pop("sum") == _chain(self.head, entry))
        except (ValueError, KeyError, TypeError, AttributeError):
            return False

    def _append(self, entry: dict[str, Any]) -> None:
        if self._closed:
            raise RuntimeError("the ledger is closed")
        if os.getpid() != self._process:
            raise RuntimeError("the ledger was opened by another process; a fork shares its file but not its account")
        checksum = _chain(self.head, entry)
        if self._file is not None:
            self._write(json.dumps({**entry, "sum": checksum}).encode() + b"\n")
        self._sums.append(checksum)

    def _write(self, line: bytes) -> None:
        """Append to the file and flush it to disk. After a failure the ledger is closed: what it holds is unsure."""
        assert self._file is not None
        try:
            written = self._file.write(line)
            if written != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._file.fileno())
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                reason = error.strerror
                raise UserError(
                    f"{self.path}: the ledger cannot be written ({reason}); free some space and --resume"
                ) from None
            raise


def _totals(parts: Iterable[tuple[dp_accounting.DpEvent, int]]) -> list[tuple[dp_accounting.DpEvent, int]]:
    """Equal events added up, in order of first use."""
    totals: list[tuple[dp_accounting.DpEvent, int]] = []
    for event, count in parts:
        for k, (known, number) in enumerate(totals):
            if known == event:
                totals[k] = (known, number + count)
                break
        else:
            totals.append((event, count))
    return [(event, count) for event, count in totals if count > 0]


def _covers(larger: list[tuple[dp_accounting.DpEvent, int]], smaller: list[tuple[dp_accounting.DpEvent, int]]) -> bool:
    """Whether every event of the second composition occurs at least as often in the first."""
    return all(any(event == known and count <= number for known, number in larger) for event, count in smaller)


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
