"""The ledger counts what was released, at least, whatever happens to the process."""

import json
import os
import subprocess
import sys

import dp_accounting
import pytest

from dp_sinkhorn.accounting import Budget, Ledger, compose, epsilon_of
from dp_sinkhorn.errors import BudgetExceededError, UserError

EVENT = dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(1.0))
OTHER = dp_accounting.GaussianDpEvent(30.0)
FREE = Budget(None, 1e-5)


def reopened(ledger: Ledger) -> Ledger:
    ledger.close()
    return Ledger(ledger.budget, ledger.path)


def test_reservations_are_on_disk_before_they_are_used(tmp_path) -> None:
    ledger = Ledger(FREE, tmp_path / "ledger.jsonl")
    ledger.reserve(EVENT, 100)
    assert json.loads((tmp_path / "ledger.jsonl").read_text())["reserve"]["count"] == 100
    again = reopened(ledger)
    assert again.releases == 100, "a block that was never settled counts in full"
    assert again.epsilon() == epsilon_of(compose([(EVENT, 100)]), 1e-5)


def test_settling_gives_back_what_was_not_used(tmp_path) -> None:
    ledger = Ledger(FREE, tmp_path / "ledger.jsonl")
    allowance = ledger.reserve(EVENT, 100)
    for _ in range(37):
        allowance.take(EVENT)
    ledger.settle(allowance)
    assert ledger.releases == 37
    with pytest.raises(RuntimeError, match="used"):
        allowance.take(EVENT)
    again = reopened(ledger)
    again.settle(again.reserve(OTHER, 5))
    assert again.parts() == [(EVENT, 37)]
    again.reserve(OTHER, 2)
    again.reserve(EVENT, 3)
    assert reopened(again).parts() == [(EVENT, 40), (OTHER, 2)]


def test_the_budget_cannot_be_passed_and_can_be_met_exactly() -> None:
    limit = epsilon_of(compose([(EVENT, 500)]), 1e-5)
    ledger = Ledger(Budget(limit, 1e-5))
    for _ in range(5):
        ledger.reserve(EVENT, 100)
    before = ledger.parts()
    with pytest.raises(BudgetExceededError, match=r"1 more releases would spend epsilon=.* over the budget"):
        ledger.reserve(EVENT, 1)
    with pytest.raises(BudgetExceededError):
        ledger.reserve(dp_accounting.NonPrivateDpEvent(), 1)
    assert ledger.parts() == before


def test_a_refusal_is_repeated() -> None:
    ledger = Ledger(Budget(0.5, 1e-5))
    for _ in range(3):
        with pytest.raises(BudgetExceededError):
            ledger.reserve(EVENT, 10**6)


def test_an_entry_settled_twice_keeps_the_smaller_rest(tmp_path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(FREE, path)
    ledger.reserve(EVENT, 10)
    ledger._append({"settle": {"entry": 0, "used": 4}})
    ledger._append({"settle": {"entry": 0, "used": 9}})
    assert reopened(ledger).releases == 4


def test_a_ledger_belongs_to_the_settings_it_was_begun_with(tmp_path) -> None:
    path = tmp_path / "ledger.jsonl"
    Ledger(FREE, path, "these").close()
    Ledger(FREE, path, "these").close()
    with pytest.raises(UserError, match="was begun with other settings"):
        Ledger(FREE, path, "others")
    unnamed = tmp_path / "unnamed.jsonl"
    ledger = Ledger(FREE, unnamed)
    ledger.reserve(EVENT, 1)
    ledger.close()
    with pytest.raises(UserError, match="was begun with other settings"):
        Ledger(FREE, unnamed, "these")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_cannot_reserve(tmp_path) -> None:
    ledger = Ledger(FREE, tmp_path / "ledger.jsonl")
    child = os.fork()
    if child == 0:
        try:
            ledger.reserve(EVENT, 1)
        except RuntimeError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    ledger.reserve(EVENT, 1)
    assert reopened(ledger).releases == 1


def test_a_refused_reservation_leaves_no_trace(tmp_path) -> None:
    ledger = Ledger(Budget(0.5, 1e-5), tmp_path / "ledger.jsonl")
    with pytest.raises(BudgetExceededError):
        ledger.reserve(EVENT, 10**6)
    assert (tmp_path / "ledger.jsonl").read_bytes() == b""


@pytest.mark.parametrize("kept", range(0, 60, 7))
def test_a_line_torn_by_a_crash_is_dropped(tmp_path, kept: int) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(FREE, path)
    ledger.reserve(EVENT, 10)
    whole = path.read_bytes()
    ledger.reserve(EVENT, 20)
    ledger.close()
    path.write_bytes(path.read_bytes()[: len(whole) + kept])
    again = Ledger(FREE, path)
    assert again.releases == 10
    again.reserve(EVENT, 5)
    assert reopened(again).releases == 15


def test_any_other_damage_is_refused(tmp_path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(FREE, path)
    ledger.reserve(EVENT, 10)
    ledger.reserve(EVENT, 20)
    ledger.close()
    content = path.read_text()
    for damaged in (
        content.replace('"count": 10', '"count": 1'),
        "".join(content.splitlines(keepends=True)[1:]),
        content.replace("reserve", "settle", 1),
        "[]\n" + content,
        "\n" + content,
    ):
        path.write_text(damaged)
        with pytest.raises(UserError, match=r"ledger.jsonl:\d: the ledger is damaged"):
            Ledger(FREE, path)


def test_a_second_process_is_kept_out(tmp_path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(FREE, path)
    script = f"""
from pathlib import Path
from dp_sinkhorn.accounting import Budget, Ledger
Ledger(Budget(None, 1e-5), Path({str(path)!r}))
"""
    blocked = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert blocked.returncode != 0
    assert "another process is using this run" in blocked.stderr
    ledger.close()
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_a_full_disk_stops_before_the_release(tmp_path, monkeypatch) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(FREE, path)
    ledger.reserve(EVENT, 10)

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match="the ledger cannot be written"):
            ledger.reserve(EVENT, 20)
    with pytest.raises(RuntimeError, match="closed"):
        ledger.reserve(EVENT, 1)
    assert reopened(ledger).releases == 30, "what may be on disk counts"


def test_a_write_cut_short_by_a_full_disk_leaves_a_readable_ledger(tmp_path, monkeypatch) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(FREE, path)
    allowance = ledger.reserve(EVENT, 10)
    whole = ledger._file

    class Full:
        def write(self, line: bytes) -> int:
            return whole.write(line[:20])

        fileno, close = whole.fileno, whole.close

    ledger._file = Full()
    allowance.take(EVENT)
    with pytest.raises(UserError, match="No space left"):
        ledger.settle(allowance)
    with pytest.raises(RuntimeError, match="used"):
        allowance.take(EVENT)
    assert Ledger(FREE, path).releases == 10


def test_a_last_line_without_its_end_counts(tmp_path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(FREE, path)
    ledger.reserve(EVENT, 5)
    ledger.reserve(EVENT, 1000)
    ledger.close()
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    again = Ledger(FREE, path)
    assert again.releases == 1005
    again.reserve(EVENT, 1)
    assert reopened(again).releases == 1006


def test_a_ledger_knows_its_past_and_not_its_future(tmp_path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(FREE, path)
    heads = [ledger.head]
    for _ in range(3):
        ledger.reserve(EVENT, 5)
        heads.append(ledger.head)
    ledger.close()
    assert all(Ledger(FREE, path).knows(head) for head in heads)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    shortened = Ledger(FREE, path)
    assert [shortened.knows(head) for head in heads] == [True, True, True, False]


def test_nothing_is_reserved_for_nothing() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Ledger(FREE).reserve(EVENT, 0)
