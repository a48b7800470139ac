"""The DCGAN generator of appendix C.3.

Four transposed convolutions, ReLU on the hidden layers and tanh at the end. Latent and class embedding are
concatenated; the first layer projects them to 256 x 7 x 7 without padding; layers 2, 3 and 4 have depths
[128, 64, 1], kernels [4, 4, 3], strides [2, 2, 1] and paddings [1, 1, 1]. Batch normalisation after each hidden
layer is DCGAN's (Radford et al. 2016); the text does not mention it, the authors' published code has it.

For other image shapes the first layer projects to a quarter of the height and width, rounded up, and the
output is cropped to the shape.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from dp_sinkhorn.generators.base import Generator, register_generator
from dp_sinkhorn.images import ImageShape


@register_generator("dcgan")
class DCGAN(Generator):
    """Depths [4 width, 2 width, width, C]; the paper's is width 64, class_embedding 4, latent 12."""

    sizes: ClassVar[dict[str, int]] = {"width": 64, "class_embedding": 4}

    def __init__(
        self, image_shape: ImageShape, classes: int, latent: int, width: int = 64, class_embedding: int = 4
    ) -> None:
        super().__init__(image_shape, classes, latent)
        channels, height, breadth = image_shape
        self.base = (math.ceil(height / 4), math.ceil(breadth / 4))
        self.embedding = nn.Embedding(classes, class_embedding)
        # A transposed convolution of a 1 x 1 input without padding is a linear map, and is faster as one. It
        # keeps the convolution's initial scale, against which the learning rate is measured.
        outputs = 4 * width * self.base[0] * self.base[1]
        self.project = nn.Linear(latent + class_embedding, outputs, bias=False)
        nn.init.uniform_(self.project.weight, -(outputs**-0.5), outputs**-0.5)
        self.layers: nn.Module = nn.Sequential(
            nn.BatchNorm2d(4 * width),
            nn.ReLU(),
            nn.ConvTranspose2d(4 * width, 2 * width, kernel_size=4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, kernel_size=4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.ConvTranspose2d(width, channels, kernel_size=3, stride=1, padding=1),
            nn.Tanh(),
        )
        self.layers.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, latents: Tensor, labels: Tensor) -> Tensor:
        """Images for latents (N, latent) and labels (N,)."""
        inputs = torch.cat([latents, self.embedding(labels)], dim=1)
        # Channels last from the start: the convolutions then run without reordering, on CPU and GPU alike.
        hidden = self.project(inputs).view(len(inputs), *self.base, -1).permute(0, 3, 1, 2)
        images: Tensor = self.layers(hidden)
        return images[:, :, : self.image_shape[1], : self.image_shape[2]]
