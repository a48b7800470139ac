from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from dp_sinkhorn.errors import UserError
from dp_sinkhorn.evaluation import QuickScores, evaluate_quick
from dp_sinkhorn.images import LabelledImages


def first(images: LabelledImages, count: int) -> LabelledImages:
    return LabelledImages(images.images[:count], images.labels[:count], images.classes)


def scores_only(scores: QuickScores) -> QuickScores:
    return replace(scores, seconds=0.0)


@pytest.fixture(scope="module")
def real_scores(digits) -> QuickScores:
    return evaluate_quick(digits.train, digits.test)


def blank(count: int, shape: tuple[int, int, int], classes: int) -> LabelledImages:
    names = tuple(str(k) for k in range(classes))
    return LabelledImages(torch.zeros(count, *shape, dtype=torch.uint8), torch.arange(count) % classes, names)


def test_real_training_images_score_high(real_scores, digits):
    assert real_scores.mlp > 93.0
    assert real_scores.cnn > 95.0
    assert (real_scores.synthetic, real_scores.reference) == (len(digits.train), len(digits.test))
    assert real_scores.seconds > 0


def test_damaged_images_score_lower(real_scores, digits):
    generator = torch.Generator().manual_seed(0)
    strength = 150 * torch.randn(digits.train.images.shape, generator=generator)
    damaged = (digits.train.images + strength).clamp(0, 255).to(torch.uint8)
    scores = evaluate_quick(LabelledImages(damaged, digits.train.labels, digits.train.classes), digits.test)
    assert scores.mlp < real_scores.mlp
    assert scores.cnn < real_scores.cnn
    assert scores.frechet > 3 * real_scores.frechet


def test_wrong_labels_ruin_accuracies_and_leave_the_distance(real_scores, digits):
    wrong = LabelledImages(digits.train.images, (digits.train.labels + 1) % 10, digits.train.classes)
    scores = evaluate_quick(wrong, digits.test)
    assert scores.mlp < 10.0
    assert scores.cnn < 10.0
    assert scores.frechet == real_scores.frechet


def test_distance_of_a_set_to_itself_is_zero(digits):
    assert evaluate_quick(digits.test, digits.test).frechet == pytest.approx(0.0, abs=1e-6)


def test_is_deterministic_by_seed_and_leaves_the_callers_random_state(digits):
    synthetic, reference = first(digits.train, 200), first(digits.test, 100)
    before = torch.get_rng_state()
    scores = evaluate_quick(synthetic, reference, seed=4)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(1)  # a different global state must not matter
    assert scores_only(evaluate_quick(synthetic, reference, seed=4)) == scores_only(scores)
    assert scores_only(evaluate_quick(synthetic, reference, seed=5)) != scores_only(scores)


def test_takes_rgb_images_and_reports_each_stage():
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (40, 3, 17, 10), dtype=torch.uint8, generator=generator)
    labelled = LabelledImages(images, torch.arange(40) % 2, ("even", "odd"))
    lines: list[str] = []
    scores = evaluate_quick(labelled, first(labelled, 20), progress=lines.append)
    assert all(0 <= value <= 100 for value in (scores.mlp, scores.cnn))
    assert lines == [
        "training the MLP on 40 synthetic images",
        "training the CNN on 40 synthetic images",
        "learning features of 20 reference images for the Fréchet distance",
        "testing on the reference images",
    ]


def test_scores_are_ready_for_json(real_scores):
    read = json.loads(json.dumps(real_scores.as_dict()))
    assert QuickScores(**read) == real_scores
    assert list(read) == ["mlp", "cnn", "frechet", "synthetic", "reference", "seconds"]


@pytest.mark.parametrize(
    ("synthetic", "reference", "message"),
    [
        (
            blank(4, (1, 28, 28), 2),
            blank(4, (3, 32, 30), 2),
            "evaluate: the synthetic images are 28x28 grey but the reference images are 32x30 RGB; "
            "evaluate against images of the same shape",
        ),
        (
            blank(20, (1, 8, 8), 10),
            blank(4, (1, 8, 8), 2),
            "evaluate: the synthetic images have 10 classes but the reference images have 2; "
            "evaluate against images of the same classes",
        ),
        (
            blank(1, (1, 8, 8), 1),
            blank(4, (1, 8, 8), 1),
            "evaluate: at least two synthetic images are needed, got 1",
        ),
        (
            blank(4, (1, 8, 8), 1),
            blank(0, (1, 8, 8), 1),
            "evaluate: at least two reference images are needed, got 0",
        ),
        (
            blank(4, (1, 4, 4), 1),
            blank(4, (1, 4, 4), 1),
            "evaluate: synthetic images: images are 4x4; each side must have 8 to 64 pixels, resize them first",
        ),
    ],
)
def test_refuses_sets_that_cannot_be_compared(synthetic, reference, message):
    with pytest.raises(UserError) as error:
        evaluate_quick(synthetic, reference)
    assert str(error.value) == message
