"""The interface of a generator g_θ(z, l), and the registry of architectures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

from dp_sinkhorn.errors import UserError
from dp_sinkhorn.images import ImageShape


@dataclass(frozen=True)
class GeneratorSpec:
    """What it takes to build a generator again: all public, and all of it in release.json.

    Attributes:
        architecture: registered name.
        image_shape: (C, H, W).
        classes: number of classes L.
        latent: dimension of z ~ Unif(0, 1).
        sizes: the architecture's own arguments.
    """

    architecture: str
    image_shape: ImageShape
    classes: int
    latent: int
    sizes: dict[str, int]


class Generator(nn.Module, ABC):
    """Maps latents in [0, 1]^latent and class labels to pixels in [-1, 1] of shape (N, C, H, W).

    A subclass takes `image_shape`, `classes` and `latent`, and after them integers that say how large it is,
    by names that `sizes` lists with their defaults.
    """

    sizes: ClassVar[dict[str, int]]

    def __init__(self, image_shape: ImageShape, classes: int, latent: int) -> None:
        super().__init__()
        self.image_shape = image_shape
        self.classes = classes
        self.latent = latent

    @abstractmethod
    def forward(self, latents: Tensor, labels: Tensor) -> Tensor:
        """Images for latents (N, latent) and labels (N,)."""

    def draw(self, labels: Tensor, public: torch.Generator) -> Tensor:
        """Images for these labels at latents drawn from a public random generator (on the CPU)."""
        latents = torch.rand(len(labels), self.latent, generator=public).to(labels.device)
        images: Tensor = self(latents, labels)
        return images


GeneratorType = TypeVar("GeneratorType", bound=type[Generator])
_REGISTRY: dict[str, type[Generator]] = {}


def register_generator(name: str) -> Callable[[GeneratorType], GeneratorType]:
    """Class decorator that makes an architecture known by a name, in settings and in releases."""

    def register(architecture: GeneratorType) -> GeneratorType:
        _REGISTRY[name] = architecture
        return architecture

    return register


def generator_class(name: str) -> type[Generator]:
    """The architecture of that name."""
    if name not in _REGISTRY:
        raise UserError(f"unknown generator '{name}'; choose one of {', '.join(sorted(_REGISTRY))}")
    return _REGISTRY[name]


def build_generator(spec: GeneratorSpec, seed: int | None = None) -> Generator:
    """Build a generator; `seed` fixes its initial weights without touching PyTorch's global generator."""
    architecture = generator_class(spec.architecture)
    unknown = set(spec.sizes) - set(architecture.sizes)
    if unknown:
        raise UserError(f"generator '{spec.architecture}' has no argument '{sorted(unknown)[0]}'")
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        return architecture(spec.image_shape, spec.classes, spec.latent, **spec.sizes)
