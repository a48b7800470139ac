"""The classifiers that synthetic images are judged by (appendix C.2 of the paper), and how they are trained.

Models take float pixels in [-1, 1] and return logits. A whole set is moved to the device once, as `uint8`,
and indexed there: at these image sizes a loader would cost more than the training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dp_sinkhorn.devices import suited_threads
from dp_sinkhorn.images import ImageShape, LabelledImages, to_pixels

HOLD_OUT = 0.1
"""Share of the given images that decides when to stop and is not trained on."""

_INFERENCE_BATCH = 500
_POOLED_SIDE = 4

Model = TypeVar("Model", bound=nn.Module)


class MLP(nn.Module):
    """One hidden layer of 100 units with ReLU.

    Args:
        shape: (C, H, W) of an image.
        classes: how many classes to tell apart.
    """

    def __init__(self, shape: ImageShape, classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(math.prod(shape), 100),
            nn.ReLU(),
            nn.Linear(100, classes),
        )

    def forward(self, pixels: Tensor) -> Tensor:
        """Logits (N, classes) of pixels (N, C, H, W)."""
        logits: Tensor = self.layers(pixels)
        return logits


class CNN(nn.Module):
    """Two hidden convolutional layers of 32 and 64 filters with ReLU, dropout 0.5 between layers.

    The paper names the widths and the dropout only. Filters are 5x5 with stride 2, which costs a CPU a quarter of
    3x3 filters that are pooled afterwards; a side is not halved below 4 pixels. The
    maxima over a 4x4 grid then make 1,024 features of an image of any size.

    Args:
        shape: (C, H, W) of an image.
        classes: how many classes to tell apart.
    """

    def __init__(self, shape: ImageShape, classes: int) -> None:
        super().__init__()
        channels, *sides = shape
        first_stride = _strides(sides)
        second_stride = _strides([math.ceil(side / step) for side, step in zip(sides, first_stride, strict=True)])
        self.convolutions = nn.Sequential(
            nn.Conv2d(channels, 32, kernel_size=5, stride=first_stride, padding=2),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Conv2d(32, 64, kernel_size=5, stride=second_stride, padding=2),
            # Before the ReLU, which commutes with a maximum and is cheaper on fewer values.
            nn.AdaptiveMaxPool2d(_POOLED_SIDE),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.classify = nn.Sequential(nn.Dropout(0.5), nn.Linear(64 * _POOLED_SIDE**2, classes))
        # A tenth to a fifth less CPU time than torch's default layout, as measured on two cores.
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def features(self, pixels: Tensor) -> Tensor:
        """Penultimate features (N, 1024), the classifier's view of pixels (N, C, H, W)."""
        features: Tensor = self.convolutions(pixels.contiguous(memory_format=torch.channels_last))
        return features

    def forward(self, pixels: Tensor) -> Tensor:
        """Logits (N, classes) of pixels (N, C, H, W)."""
        logits: Tensor = self.classify(self.features(pixels))
        return logits


def train_classifier(
    model: Model,
    images: LabelledImages,
    *,
    max_epochs: int,
    patience: int,
    seed: int,
    device: torch.device | str,
    batch_size: int = 64,
) -> Model:
    """Train on 90% of `images`, stop by the loss on the other 10%, keep the weights that were best there.

    Adam with its default settings. The hold-out comes from the *given* images, which are synthetic when a
    generator is judged: selecting anything on real data would flatter it. Same arguments and same initial weights
    give the same classifier on a CPU; the caller's random state is left as it was.

    Args:
        model: trained in place, moved to `device`.
        images: at least two.
        max_epochs: stop after so many passes at the latest.
        patience: stop after so many passes in a row without a lower hold-out loss.
        seed: of the hold-out, the order of the images and the dropout.
        device: where to train.
        batch_size: images per step of Adam.

    Returns:
        `model`, in evaluation mode.
    """
    assert len(images) >= 2, "nothing would be left to train on"
    model.to(device)
    inputs, labels = images.images.to(device), images.labels.to(device)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(images), generator=generator)
    held_out, kept = order.tensor_split([math.ceil(HOLD_OUT * len(images))])
    held_out = held_out.to(device)
    optimiser = torch.optim.Adam(model.parameters())
    best_loss, best_weights, epochs_since_best = math.inf, _copy_weights(model), 0
    with seeded(seed, device), suited_threads(batch_size * math.prod(images.shape)):
        for _ in range(max_epochs):
            model.train()
            shuffled = kept[torch.randperm(len(kept), generator=generator)].to(device)
            for batch in torch.split(shuffled, batch_size):
                loss = F.cross_entropy(model(to_pixels(inputs[batch])), labels[batch])
                optimiser.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimiser.step()
            model.eval()
            held_out_loss = F.cross_entropy(_in_batches(model, inputs[held_out]), labels[held_out]).item()
            if held_out_loss < best_loss:
                best_loss, best_weights, epochs_since_best = held_out_loss, _copy_weights(model), 0
            else:
                epochs_since_best += 1
                if epochs_since_best == patience:
                    break
    model.load_state_dict(best_weights)
    return model.eval()


def accuracy(model: nn.Module, images: LabelledImages, device: torch.device | str) -> float:
    """Percentage of `images` whose label `model` finds."""
    model.to(device).eval()
    predicted = _in_batches(model, images.images.to(device)).argmax(dim=1)
    return 100.0 * (predicted == images.labels.to(device)).double().mean().item()


def extract_features(model: CNN, images: LabelledImages, device: torch.device | str) -> Tensor:
    """Penultimate features (N, 1024) of `images`, without dropout."""
    model.to(device).eval()
    return _in_batches(model.features, images.images.to(device))


@contextmanager
def seeded(seed: int, device: torch.device | str) -> Iterator[None]:
    """Run a block under its own random state on the CPU and `device`; the caller's state comes back after it.

    Layers draw their initial weights and their dropout from torch's global state and take no generator.
    """
    device = torch.device(device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        # torch.manual_seed would also seed the accelerators whose state is not kept here.
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


@torch.no_grad()
def _in_batches(function: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    return torch.cat([function(to_pixels(batch)) for batch in torch.split(images, _INFERENCE_BATCH)])


def _copy_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _strides(sides: Sequence[int]) -> tuple[int, int]:
    """Halve a side unless that would leave fewer pixels than the pooled grid has cells."""
    height, width = (2 if side >= 2 * _POOLED_SIDE else 1 for side in sides)
    return height, width
