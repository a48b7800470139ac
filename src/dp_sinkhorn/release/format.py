"""What stands in release.json."""

from __future__ import annotations

import decimal
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from dp_sinkhorn.generators import GeneratorSpec
from dp_sinkhorn.images import MAX_SIDE, MIN_SIDE

FORMAT_VERSION = 1
WEIGHTS_FILE, INFO_FILE, SAMPLES_FILE, CARD_FILE = "generator.safetensors", "release.json", "samples.png", "CARD.md"
LABELLER = "labeller."
"""How the names of the probe's tensors begin, beside those of the generator."""

# Bounds that a file from elsewhere must keep before anything is allocated for it.
_Side = Annotated[int, Field(ge=MIN_SIDE, le=MAX_SIDE)]
_Size = Annotated[int, Field(ge=1, le=4096)]


def up(epsilon: float) -> str:
    """ε to four digits, never below the figure itself: a guarantee is not rounded in its own favour."""
    context = decimal.Context(prec=4, rounding=decimal.ROUND_CEILING)
    return f"{context.create_decimal(epsilon).normalize():f}"


class ReleasedEvent(BaseModel):
    """Equal releases, as they were accounted: a `dp_accounting` event as JSON, and how often it happened."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    event: dict[str, Any]
    count: PositiveInt


class PrivacyStatement(BaseModel):
    """The guarantee of a release, in numbers from which it can be computed again."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    private: bool = Field(description="False: there is no guarantee, and epsilon is null")
    epsilon: float | None = Field(ge=0)
    delta: float | None = Field(gt=0, lt=1)
    neighbouring: Literal["add-or-remove-one"] = "add-or-remove-one"
    accountant: str
    mechanism: str
    sampling_rate: float
    noise_multiplier: float = Field(description="sigma as the mechanism's own text states it")
    steps: int
    records: int
    randomness: Literal["os-entropy", "seeded"]
    classes_declared: bool = Field(
        True, description="False: the classes are the labels that occur, which the guarantee does not cover"
    )
    ledger: str = Field("", description="checksum of the run's ledger, which --resume asks for")
    events: list[ReleasedEvent] = Field(description="what was composed to get epsilon")
    statement: str = Field(description="the guarantee in a sentence")


class ReleaseInfo(BaseModel):
    """release.json as a whole."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: int
    package_version: str
    architecture: str
    arguments: dict[str, _Size]
    image_shape: tuple[Literal[1, 3], _Side, _Side] = Field(description="channels, height, width")
    classes: list[str] = Field(min_length=1, max_length=10_000)
    latent: _Size
    labels: Literal["generator", "probe"] = Field(
        "generator", description="who says of what class an image is: what was asked for, or the probe beside it"
    )
    privacy: PrivacyStatement

    @property
    def spec(self) -> GeneratorSpec:
        """What `build_generator` needs."""
        return GeneratorSpec(self.architecture, self.image_shape, len(self.classes), self.latent, self.arguments)
