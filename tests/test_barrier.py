"""The privacy barrier, checked on the package's own source."""

import ast
import copy
import pickle
from pathlib import Path

import pytest
import torch

import dp_sinkhorn
from dp_sinkhorn.errors import UserError
from dp_sinkhorn.images import LabelledImages
from dp_sinkhorn.mechanisms import OsEntropy
from dp_sinkhorn.records import PrivateRecords

PACKAGE = Path(dp_sinkhorn.__file__).parent
INSIDE = ("records", "mechanisms")
BEHIND_THE_BARRIER = {
    "poisson_sample", "RecordBatch", "_all_features", "_PrivateRecords__features", "_PrivateRecords__images",
    "_PrivateRecords__labels",
}  # fmt: skip


def test_nothing_outside_records_and_mechanisms_reaches_for_a_record() -> None:
    offenders = []
    inside = 0
    for path in PACKAGE.rglob("*.py"):
        names = {
            getattr(node, "attr", None) or getattr(node, "id", None) or getattr(node, "name", None)
            for node in ast.walk(ast.parse(path.read_text()))
        }
        found = names & BEHIND_THE_BARRIER
        if path.relative_to(PACKAGE).parts[0] in INSIDE:
            inside += len(found)
        elif found:
            offenders.append((path.name, found))
    assert not offenders
    assert inside > 0, "the names this test looks for must exist"


def test_training_and_release_do_not_read_sources() -> None:
    for folder in ("training", "release", "generators", "transport"):
        for path in (PACKAGE / folder).rglob("*.py"):
            assert "load_source" not in path.read_text(), path


def records() -> PrivateRecords:
    images = torch.full((40, 1, 8, 8), 77, dtype=torch.uint8)
    images[:, 0, 0, 0] = torch.arange(40)
    return PrivateRecords(LabelledImages(images, torch.arange(40) % 2, ("a", "b")))


def test_the_holder_shows_public_facts_only() -> None:
    held = records()
    assert repr(held) == "PrivateRecords(count=40, shape=(1, 8, 8), classes=2)"
    assert "77" not in repr(
        LabelledImages(torch.full((2, 1, 8, 8), 77, dtype=torch.uint8), torch.tensor([0, 1]), ("a", "b"))
    )
    with pytest.raises(TypeError, match="pickled"):
        pickle.dumps(held)
    with pytest.raises(TypeError, match="pickled"):
        copy.deepcopy(held)
    for attempt in (lambda: held[0], lambda: iter(held), lambda: len(held)):
        with pytest.raises(TypeError):
            attempt()


def test_a_poisson_batch_holds_the_drawn_records_once_with_their_labels() -> None:
    batch = records().poisson_sample(1.0, OsEntropy())
    assert batch.pixels.shape == (40, 64)
    assert batch.pixels.min() >= -1
    assert batch.pixels.max() <= 1
    numbers = ((batch.pixels[:, 0] + 1) * 127.5).round().long()
    assert numbers.tolist() == list(range(40))
    assert torch.equal(batch.labels, numbers % 2)
    sizes = {len(records().poisson_sample(0.5, OsEntropy()).labels) for _ in range(40)}
    assert len(sizes) > 3, "the size of a Poisson batch varies"


def test_a_single_record_is_refused() -> None:
    one = LabelledImages(torch.zeros(1, 1, 8, 8, dtype=torch.uint8), torch.zeros(1, dtype=torch.long), ("a",))
    with pytest.raises(UserError, match="at least two records are needed, got 1"):
        PrivateRecords(one)
