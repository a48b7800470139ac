"""The `quick` protocol: every score once, in a minute on a laptop."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import nn

from dp_sinkhorn.errors import UserError
from dp_sinkhorn.evaluation.classifiers import CNN, MLP, Model, accuracy, extract_features, seeded, train_classifier
from dp_sinkhorn.evaluation.frechet import frechet_distance
from dp_sinkhorn.images import LabelledImages, check_shape

_PATIENCE = 5
_MAX_EPOCHS = 40
_MIN_EPOCHS = 3
_IMAGES_SEEN: dict[type[nn.Module], int] = {MLP: 400_000, CNN: 100_000}
"""What one training may look at, repeats included: the time is about the same for few images and for many."""


@dataclass(frozen=True)
class QuickScores:
    """What `evaluate_quick` found.

    Attributes:
        mlp: accuracy on the reference, in percent, of the MLP trained on the synthetic images.
        cnn: the same of the CNN.
        frechet: Fréchet distance between the two sets in features learnt from the reference. It is not the FID, and
            compares only with distances to the same reference, with the same seed and package version.
        synthetic: how many synthetic images were given.
        reference: how many reference images were given.
        seconds: how long it took.
    """

    mlp: float
    cnn: float
    frechet: float
    synthetic: int
    reference: int
    seconds: float

    def as_dict(self) -> dict[str, float]:
        """The scores by name, ready for JSON."""
        return asdict(self)


def evaluate_quick(
    synthetic: LabelledImages,
    reference: LabelledImages,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    progress: Callable[[str], None] | None = None,
) -> QuickScores:
    """Score synthetic images against a real, labelled test set.

    An MLP and a CNN are trained once on the synthetic images and tested on the reference. The Fréchet distance is
    taken in the penultimate features of a second CNN, which is trained on the reference itself. Not on the
    training records, although they are more: an evaluation must not touch them, for its result would be private.
    So the features depend on the reference, the seed and this package's version, and distances compare only where
    those three agree.

    On a CPU the same images and seed give the same scores (with another number of threads sums round differently).
    torch's global random state is left as it was.

    Args:
        synthetic: images that were generated, with the labels they were generated for.
        reference: real images that were not trained on, and may be looked at.
        seed: of the classifiers' weights, hold-outs and dropout.
        device: where to train the classifiers.
        progress: called with one line before each stage.

    Raises:
        UserError: the two sets differ in image shape or number of classes, or one is too small to train on.
    """
    _check_comparable(synthetic, reference)
    start = time.perf_counter()
    report = progress or _silent

    report(f"training the MLP on {len(synthetic):,} synthetic images")
    mlp = _train(MLP, synthetic, seed, device)
    report(f"training the CNN on {len(synthetic):,} synthetic images")
    cnn = _train(CNN, synthetic, seed, device)
    report(f"learning features of {len(reference):,} reference images for the Fréchet distance")
    feature_net = _train(CNN, reference, seed, device)
    report("testing on the reference images")
    return QuickScores(
        mlp=accuracy(mlp, reference, device),
        cnn=accuracy(cnn, reference, device),
        frechet=frechet_distance(
            extract_features(feature_net, synthetic, device), extract_features(feature_net, reference, device)
        ),
        synthetic=len(synthetic),
        reference=len(reference),
        seconds=time.perf_counter() - start,
    )


def _train(model_class: type[Model], images: LabelledImages, seed: int, device: torch.device | str) -> Model:
    with seeded(seed, "cpu"):
        model = model_class(images.shape, len(images.classes))
    max_epochs = min(_MAX_EPOCHS, max(_MIN_EPOCHS, _IMAGES_SEEN[model_class] // len(images)))
    return train_classifier(model, images, max_epochs=max_epochs, patience=_PATIENCE, seed=seed, device=device)


def _check_comparable(synthetic: LabelledImages, reference: LabelledImages) -> None:
    if synthetic.shape != reference.shape:
        raise UserError(
            f"evaluate: the synthetic images are {_describe(synthetic)} but the reference images are "
            f"{_describe(reference)}; evaluate against images of the same shape"
        )
    if len(synthetic.classes) != len(reference.classes):
        raise UserError(
            f"evaluate: the synthetic images have {len(synthetic.classes)} classes but the reference images have "
            f"{len(reference.classes)}; evaluate against images of the same classes"
        )
    for name, images in (("synthetic", synthetic), ("reference", reference)):
        check_shape(images.shape, f"evaluate: {name} images")
        if len(images) < 2:
            raise UserError(f"evaluate: at least two {name} images are needed, got {len(images)}")


def _describe(images: LabelledImages) -> str:
    channels, height, width = images.shape
    return f"{height}x{width} {'grey' if channels == 1 else 'RGB'}"


def _silent(_: str) -> None:
    pass
