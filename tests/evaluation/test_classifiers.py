from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dp_sinkhorn.evaluation import CNN, MLP, accuracy, extract_features, train_classifier
from dp_sinkhorn.evaluation.classifiers import seeded
from dp_sinkhorn.images import LabelledImages, to_pixels

SHAPES = [(1, 8, 8), (1, 9, 33), (3, 8, 64), (1, 28, 28), (3, 32, 32), (3, 64, 64)]


def build(model_class: type[nn.Module], images: LabelledImages) -> nn.Module:
    with seeded(0, "cpu"):
        return model_class(images.shape, len(images.classes))


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


class TrainingPasses:
    """Counts the images that a model was given in training mode."""

    def __init__(self, model: nn.Module) -> None:
        self.images = 0
        model.register_forward_hook(self.count)

    def count(self, model, inputs, logits):
        self.images += len(logits) * model.training


class ReadsTopLeftPixel(nn.Module):
    """Predicts class 1 where the top left pixel is white, class 0 where it is black."""

    def forward(self, pixels: Tensor) -> Tensor:
        corner = pixels[:, 0, 0, 0]
        return torch.stack([-corner, corner], dim=1)


class ScriptedConfidence(nn.Module):
    """Each time it is evaluated it is as sure of class 0 as the script says."""

    def __init__(self, *confidences: float) -> None:
        super().__init__()
        self.confidences = iter(confidences)
        self.weight = nn.Parameter(torch.zeros(2))

    def forward(self, pixels: Tensor) -> Tensor:
        if self.training:
            return self.weight.expand(len(pixels), 2)
        return torch.tensor([[float(next(self.confidences)), 0.0]]).expand(len(pixels), 2)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("model_class", [MLP, CNN])
def test_takes_any_image_shape(model_class, shape):
    logits = model_class(shape, 7)(torch.rand(3, *shape))
    assert logits.shape == (3, 7)
    assert logits.isfinite().all()


@pytest.mark.parametrize("shape", SHAPES)
def test_cnn_has_1024_features_of_any_image_that_tell_images_apart(shape):
    cnn = CNN(shape, 2).eval()
    features = cnn.features(torch.rand(5, *shape) * 2 - 1)
    assert features.shape == (5, 1024)
    assert (features.std(dim=0) > 0).float().mean() > 0.5


def test_mlp_has_one_hidden_layer_of_100():
    assert sum(p.numel() for p in MLP((1, 28, 28), 10).parameters()) == 784 * 100 + 100 + 100 * 10 + 10


def test_cnn_has_32_and_64_filters():
    filters = [layer.out_channels for layer in CNN((3, 32, 32), 10).modules() if isinstance(layer, nn.Conv2d)]
    assert filters == [32, 64]


def test_cnn_drops_half_of_what_passes_between_layers_while_training():
    cnn = CNN((1, 8, 8), 2)
    assert [layer.p for layer in cnn.modules() if isinstance(layer, nn.Dropout)] == [0.5, 0.5]
    pixels = torch.rand(4, 1, 8, 8)
    assert not torch.equal(cnn(pixels), cnn(pixels))
    cnn.eval()
    assert torch.equal(cnn(pixels), cnn(pixels))


def test_accuracy_is_the_percentage_of_labels_found_over_all_batches():
    images = torch.zeros(1200, 1, 8, 8, dtype=torch.uint8)
    images[:900, 0, 0, 0] = 255
    labels = torch.ones(1200, dtype=torch.int64)
    assert accuracy(ReadsTopLeftPixel(), LabelledImages(images, labels, ("black", "white")), "cpu") == 75.0


def test_accuracy_and_features_are_taken_without_dropout(digits):
    cnn = CNN((1, 8, 8), 10).train()
    assert accuracy(cnn, digits.test, "cpu") == accuracy(cnn.train(), digits.test, "cpu")
    features = extract_features(cnn.train(), digits.train, "cpu")
    assert features.shape == (len(digits.train), 1024)
    assert not features.requires_grad
    torch.testing.assert_close(features[1000:1003], cnn.features(to_pixels(digits.train.images[1000:1003])))


def test_cnn_learns_digits(digits):
    cnn = train_classifier(build(CNN, digits.train), digits.train, max_epochs=20, patience=5, seed=0, device="cpu")
    assert not cnn.training
    assert accuracy(cnn, digits.test, "cpu") > 95.0


@pytest.mark.parametrize("model_class", [MLP, CNN])
def test_same_seed_gives_the_same_classifier(model_class, digits):
    def train(seed):
        model = build(model_class, digits.test)
        return weights(train_classifier(model, digits.test, max_epochs=2, patience=2, seed=seed, device="cpu"))

    assert torch.equal(train(1), train(1))
    assert not torch.equal(train(1), train(2))


def test_training_leaves_the_callers_random_state(digits):
    model = build(CNN, digits.test)
    before = torch.get_rng_state()
    train_classifier(model, digits.test, max_epochs=1, patience=1, seed=0, device="cpu")
    assert torch.equal(torch.get_rng_state(), before)


def test_seeded_gives_the_random_state_back_after_an_error():
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="shape"), seeded(3, "cpu"):
        torch.rand(2).reshape(3)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_tenth_is_held_out(noise):
    model = build(MLP, noise)
    passes = TrainingPasses(model)
    train_classifier(model, noise, max_epochs=3, patience=3, seed=0, device="cpu")
    assert passes.images == 3 * 180


def test_stops_after_so_many_passes_in_a_row_without_improvement():
    images = LabelledImages(torch.zeros(20, 1, 8, 8, dtype=torch.uint8), torch.zeros(20, dtype=torch.int64), ("a", "b"))

    def passes_needed(model: nn.Module, **limits: int) -> int:
        passes = TrainingPasses(model)
        train_classifier(model, images, seed=0, device="cpu", **limits)
        return passes.images // 18

    # Better, worse, better, worse, no better: the one bad pass in between does not count.
    assert passes_needed(ScriptedConfidence(1, 0, 2, 1, 2, 9, 9), max_epochs=7, patience=2) == 5
    assert passes_needed(ScriptedConfidence(1, 2, 3, 4, 5, 6, 7), max_epochs=7, patience=2) == 7


def test_restores_the_weights_that_were_best_on_the_hold_out(noise):
    def train(max_epochs: int) -> nn.Module:
        model = build(MLP, noise)
        return train_classifier(model, noise, max_epochs=max_epochs, patience=max_epochs, seed=0, device="cpu")

    by_length = {epochs: weights(train(epochs)) for epochs in (5, 40, 60)}
    assert torch.equal(by_length[40], by_length[60])
    assert accuracy(train(60), noise, "cpu") < 95.0, "memorised the images in spite of the hold-out"


def test_two_images_are_enough():
    images = torch.tensor([0, 255], dtype=torch.uint8)[:, None, None, None].expand(2, 1, 8, 8)
    pair = LabelledImages(images, torch.tensor([0, 1]), ("black", "white"))
    train_classifier(build(CNN, pair), pair, max_epochs=2, patience=1, seed=0, device="cpu")
