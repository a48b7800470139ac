"""Small public stand-ins for private records, and settings that train on them in a second."""

import torch

from dp_sinkhorn.images import LabelledImages
from dp_sinkhorn.records import PrivateRecords
from dp_sinkhorn.settings import Settings, parse_settings


def stripes(count: int = 60, channels: int = 1, side: int = 8) -> LabelledImages:
    """Two classes: bright upper half, bright left half, with some noise."""
    stream = torch.Generator().manual_seed(0)
    images = torch.randint(0, 60, (count, channels, side, side), dtype=torch.uint8, generator=stream)
    labels = torch.arange(count) % 2
    images[labels == 0, :, : side // 2] += 190
    images[labels == 1, :, :, : side // 2] += 190
    return LabelledImages(images, labels, ("top", "left"))


def records(**options) -> PrivateRecords:
    return PrivateRecords(stripes(**options))


SMALL = {
    "batch_size": 12, "rows": 8, "width": 2, "latent": 3, "class_embedding": 2, "temperature": 2.0, "clip": 0.3,
    "debias": 0.4, "averaging": 0.999, "beta2": 0.999, "learning_rate": 1e-3, "feature_scale": 3.0,
    "temperature_end": 2.0, "debias_end": 0.4, "steps": 20,
}  # fmt: skip


def small_settings(**overrides) -> Settings:
    return parse_settings(None, {**SMALL, **overrides})
