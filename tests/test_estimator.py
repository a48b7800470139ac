"""`DPSinkhorn` keeps scikit-learn's conventions."""

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError

from dp_sinkhorn import DPSinkhorn, load_release
from dp_sinkhorn.errors import UserError
from tests.toy import SMALL, stripes


@pytest.fixture(scope="module")
def data():
    images = stripes()
    return images.images.squeeze(1).numpy(), images.labels.numpy()


def small(**arguments) -> DPSinkhorn:
    return DPSinkhorn(**{"epsilon": 3.0, "settings": {**SMALL, "steps": 5}, "device": "cpu", **arguments})


def test_fit_sample_save(data, tmp_path) -> None:
    model = small()
    assert model.fit(*data) is model
    images, labels = model.sample(6)
    assert images.shape == (6, 8, 8)
    assert labels.tolist() == [0, 1, 0, 1, 0, 1]
    assert model.sample(3, labels=1)[1].tolist() == [1, 1, 1]
    assert 0 < model.privacy_.epsilon <= 3.0
    assert model.privacy_.records == 60
    saved = model.save(tmp_path / "release")
    assert load_release(saved).privacy == model.privacy_


@pytest.mark.parametrize(
    "convert",
    [
        lambda images: images,
        lambda images: images / 255.0,
        torch.from_numpy,
        lambda images: images[..., None],
        lambda images: images[:, None].repeat(3, axis=1),
        lambda images: images[..., None].repeat(3, axis=-1),
    ],
)
def test_arrays_and_tensors_of_every_layout(data, convert) -> None:
    images, labels = data
    model = small(epsilon=None, settings={**SMALL, "steps": 1, "noise_multiplier": 20}).fit(convert(images), labels)
    assert len(model.sample(4)[0]) == 4


def test_parameters_and_clone() -> None:
    model = small(delta=1e-6, mechanism="batch", seed=3)
    parameters = model.get_params()
    assert parameters["epsilon"] == 3.0
    assert parameters["mechanism"] == "batch"
    copy = clone(model)
    assert copy is not model
    assert copy.get_params() == parameters
    copy.set_params(epsilon=1.0)
    assert (copy.epsilon, model.epsilon) == (1.0, 3.0)
    assert "epsilon=3.0" in repr(model)


def test_before_fit_there_is_nothing_to_sample(tmp_path) -> None:
    with pytest.raises(NotFittedError):
        small().sample(3)
    with pytest.raises(NotFittedError):
        small().save(tmp_path)
    assert not hasattr(small(), "privacy_")


def test_a_clone_is_not_fitted_and_a_fit_leaves_parameters_alone(data) -> None:
    model = small()
    before = model.get_params()
    model.fit(*data)
    assert model.get_params() == before
    with pytest.raises(NotFittedError):
        clone(model).sample(1)


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (np.zeros((4, 8, 8)), np.array([0, 1, 0]), "expected one label for each of the 4 images"),
        (np.zeros((4, 8, 8)), np.array([0, 2, 0, 2]), "not contiguous, class 1"),
        (np.full((4, 8, 8), 16.0), np.array([0, 1, 0, 1]), r"float pixels must lie in \[0, 1\]"),
        (np.full((4, 8, 8), np.nan), np.array([0, 1, 0, 1]), "NaN"),
        (np.zeros((4, 5, 5)), np.array([0, 1, 0, 1]), "8 to 64 pixels"),
        (np.zeros((1, 8, 8)), np.array([0]), "at least two records"),
    ],
)
def test_bad_data_is_explained(images, labels, message) -> None:
    with pytest.raises(UserError, match=message):
        small().fit(images, labels)


def test_declared_classes_do_not_depend_on_the_data(data) -> None:
    images, labels = data
    model = small(
        classes=["top", "left", "bottom"], epsilon=None, settings={**SMALL, "steps": 2, "noise_multiplier": 20}
    )
    assert model.fit(images, labels).classes_ == ["top", "left", "bottom"]
    assert model.sample(3, labels=2)[0].shape == (3, 8, 8)
    with pytest.raises(UserError, match="label 1 is out of range for 1 classes"):
        small(classes=["top"]).fit(images, labels)


def test_nonprivate_needs_epsilon_none(data) -> None:
    with pytest.raises(UserError, match="'nonprivate' has no epsilon"):
        small(mechanism="nonprivate").fit(*data)
    model = small(mechanism="nonprivate", epsilon=None).fit(*data)
    assert model.privacy_.private is False
