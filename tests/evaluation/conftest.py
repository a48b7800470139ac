from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from dp_sinkhorn.images import LabelledImages, from_arrays


class Split(NamedTuple):
    train: LabelledImages
    test: LabelledImages


@pytest.fixture(scope="session")
def digits() -> Split:
    """scikit-learn's handwritten digits, 8x8 grey: 1,498 to train on and 299 to test on."""
    data = load_digits()
    train_x, test_x, train_y, test_y = train_test_split(
        data.images / 16.0, data.target, test_size=300, stratify=data.target, random_state=0
    )
    return Split(from_arrays(train_x, train_y), from_arrays(test_x, test_y))


@pytest.fixture(scope="session")
def noise() -> LabelledImages:
    """Images and labels that have nothing to do with each other: there is nothing to learn, only to memorise."""
    generator = torch.Generator().manual_seed(5)
    images = torch.randint(0, 256, (200, 1, 12, 12), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 2, (200,), generator=generator)
    return LabelledImages(images, labels, ("0", "1"))
