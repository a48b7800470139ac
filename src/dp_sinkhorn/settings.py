"""Validated settings of a run, the presets, and the automatic plan.

Every setting is public: none may be chosen by looking at the private records. A setting can be given on the
command line as `--set name=value`; what is left out, `complete` fills in from public numbers alone. docs/paper-map.md
traces the values of the `paper-*` presets to the sentences that state them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dp_sinkhorn.accounting import Accountant, compose, epsilon_of, solve_noise, solve_steps
from dp_sinkhorn.errors import UserError
from dp_sinkhorn.images import ImageShape
from dp_sinkhorn.mechanisms import Mechanism, NonPrivateMechanism, PerRecordMechanism, mechanism_class

DEFAULT_EPSILON = 10.0


Scale = Literal["small", "large"]

_LEAST_PROBE_SHARE = 1e-4

_PAPER_MECHANISMS: dict[str, Any] = {
    "batch_size": 10.0,
    "clip": 0.3,
    "steps": 10_000,
    "debias": 0.4,
    "temperature": 30.0,
    "latent": 4,
    "class_embedding": 10,
    "width": 16,
    "learning_rate": 1e-3,
    "averaging": 0.999,
    "beta2": 0.999,
}


class Settings(BaseModel):
    """Everything that decides a run besides the records. None is for `complete` to fill."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    mechanism: str = Field("per_record", description="which mechanism sanitises the gradient")
    epsilon: float | None = Field(None, gt=0, description="target epsilon: the most that training may spend")
    delta: float | None = Field(None, gt=0, lt=1, description="delta; by default a power of ten below 1/records")
    accountant: Accountant = Field("pld", description="pld (tighter) or rdp")
    noise_multiplier: float | None = Field(
        None, ge=1e-6, le=1e9, description="sigma; solved from epsilon and steps if left out"
    )
    steps: int | None = Field(
        None, ge=1, le=10_000_000, description="T, training steps; solved from epsilon and sigma if left out"
    )
    nominal_records: int | None = Field(
        None,
        ge=2,
        description="the number of records to state and to sample by, where the true one must not be published",
    )
    batch_size: float | None = Field(
        None, gt=0, description="expected Poisson batch; the sampling rate is batch_size / records"
    )
    clip: float | None = Field(None, ge=1e-9, le=1e9, description="clipping norm: Delta, or C of per_record")

    rows: int | None = Field(None, ge=1, description="n, generated images compared with records in a step")
    own_samples: int | None = Field(None, ge=1, description="m', images the generator is compared with itself by")
    debias: float | None = Field(None, ge=0, le=1, description="p, the debiasing fraction; r of per_record")
    debias_end: float | None = Field(None, ge=0, le=1, description="r at the end of training")
    l1_weight: float = Field(0.0, ge=0, le=1e6, description="m, weight of the L1 term of the cost")
    l2_weight: float = Field(1.0, ge=0, le=1e6, description="weight of the squared L2 term of the cost")
    class_scale: float = Field(
        15.0, ge=0, le=1e4, description="alpha_c, scale of the one-hot class embedding in the cost"
    )
    temperature: float | None = Field(
        None, ge=1e-6, le=1e9, description="lambda, strength of the entropic regularisation"
    )
    temperature_end: float | None = Field(
        None, ge=1e-6, le=1e9, description="lambda of per_record at the end of training"
    )
    exponent: float = Field(1.0, ge=0.5, le=4, description="p of the epsilon-scaling descent: lambda = blur^p")
    scaling: float = Field(0.5, ge=0.01, le=0.99, description="ratio of successive blurs in the descent")
    histogram_share: float = Field(0.01, ge=1e-4, le=0.5, description="share of a release that counts the classes")
    probe_share: float = Field(0.32, ge=0, lt=1, description="share of a release that trains the probe; 0: no probe")
    feature_scale: float | None = Field(
        None, ge=0, le=40, description="s, weight of oriented energies beside pixels in per_record; 0: none"
    )

    generator: str = Field("dcgan", description="generator architecture")
    latent: int | None = Field(None, ge=1, le=4096, description="latent dimension")
    class_embedding: int | None = Field(None, ge=1, le=4096, description="dimension of the generator's class embedding")
    width: int | None = Field(None, ge=1, le=4096, description="channels of the generator's last hidden layer")

    precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="of the generator's passes in training; auto: bfloat16 where the hardware has it"
    )

    optimizer: Literal["adam", "sgd"] = Field("adam", description="adam or sgd")
    learning_rate: float | None = Field(None, gt=0, description="learning rate")
    learning_rate_end: float = Field(0.1, ge=0, le=1, description="the rate falls linearly to this fraction of itself")
    beta1: float = Field(0.9, ge=0, lt=1, description="Adam's first decay; the momentum of SGD")
    beta2: float | None = Field(None, ge=0, lt=1, description="Adam's second decay")
    weight_decay: float = Field(0.0, ge=0, description="weight decay")
    averaging: float | None = Field(
        None, ge=0, lt=1, description="decay of the weights' running average that is released; 0: off"
    )

    seed: int = Field(0, ge=0, lt=2**63, description="seed of public randomness: initial weights, latents, labels")
    insecure_debug_noise_seed: int | None = Field(
        None, ge=0, lt=2**63, description="debugging only: seeds the private randomness, which VOIDS the guarantee"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        mechanism_class(self.mechanism)
        if self.l1_weight == 0 and self.l2_weight == 0:
            raise ValueError("l1_weight and l2_weight cannot both be 0")
        if 0 < self.probe_share < _LEAST_PROBE_SHARE:
            raise ValueError(f"probe_share must be 0 (no probe) or at least {_LEAST_PROBE_SHARE:g}")
        return self

    @property
    def n(self) -> int:
        """Generated images that are compared with records in a step: n = qM in Algorithm 1, unless `rows` says."""
        return self.rows if self.rows is not None else max(1, round(self.given("batch_size")))

    def given(self, name: str) -> Any:
        """A setting that `complete` has filled in."""
        value = getattr(self, name)
        if value is None:
            raise ValueError(f"setting {name} is not filled in yet; call complete() first")
        return value

    def make_mechanism(self, records: int) -> Mechanism:
        """The mechanism these settings describe over `records` records; σ is 1 where it is yet to be solved."""
        batch_size = self.given("batch_size")
        if batch_size > records:
            raise UserError(
                f"batch_size {batch_size:g} is larger than the number of records, {records}; "
                "lower it with --set batch_size=..."
            )
        return mechanism_class(self.mechanism).from_settings(self, batch_size / records, self.noise_multiplier or 1.0)

    def is_private(self) -> bool:
        """Whether the run has a guarantee at all."""
        return (
            not issubclass(mechanism_class(self.mechanism), NonPrivateMechanism)
            and self.insecure_debug_noise_seed is None
        )


class Plan(BaseModel):
    """What a run will cost: any one of ε, σ and T solved from the other two."""

    model_config = ConfigDict(frozen=True)

    mechanism: str
    records: int
    epsilon: float | None = Field(description="what the planned run costs; null without protection")
    target_epsilon: float | None = Field(description="the most that training may spend; null without protection")
    delta: float
    noise_multiplier: float
    steps: int
    batch_size: float
    sampling_rate: float
    accountant: Accountant
    event_noise_multiplier: float | None = Field(description="noise over sensitivity, as accounted")
    as_published_epsilon: float | None = Field(None, description="the paper's recipe for `row`; not a guarantee")


def plan(settings: Settings, records: int) -> Plan:
    """Say what a run over a number of records costs.

    Two of ε, σ and T decide the third; what is missing beyond that is ε = 10 and the T of `complete`.
    With all three given, the cost is computed and must not pass ε.
    """
    if records < 2:
        raise UserError(f"at least two records are needed, got {records}")
    steps_given = settings.steps
    settings = complete(settings, records)
    delta = settings.delta if settings.delta is not None else default_delta(records)
    mechanism = settings.make_mechanism(records)
    if isinstance(mechanism, NonPrivateMechanism):
        return _plan_without_privacy(settings, mechanism, records, delta)
    if delta >= 1.0 / records:
        raise UserError(
            f"delta={delta:g} is not below 1/records = {1 / records:.3g}, so it would allow publishing a whole "
            f"record; use at most {default_delta(records):g}"
        )
    epsilon, noise, steps = settings.epsilon, settings.noise_multiplier, steps_given
    if epsilon is None and (noise is None or steps is None):
        epsilon = DEFAULT_EPSILON
    if noise is None:
        assert epsilon is not None
        steps = settings.given("steps")
        assert steps is not None
        noise = solve_noise(mechanism, steps, epsilon, delta, settings.accountant)
    elif steps is None:
        assert epsilon is not None
        steps = solve_steps(mechanism, epsilon, delta, settings.accountant)
    mechanism = dataclasses.replace(mechanism, noise_multiplier=noise)
    cost = epsilon_of(compose([(mechanism.event, steps)]), delta, settings.accountant)
    if not math.isfinite(cost):
        raise UserError(
            f"mechanism '{mechanism.name}' has no finite epsilon with these settings at delta={delta:g}; "
            "raise the noise multiplier, or see what its event says"
        )
    if epsilon is not None and cost > epsilon:
        raise UserError(
            f"{steps} steps of '{mechanism.name}' with noise_multiplier={noise:g} cost epsilon={cost:.4g} at "
            f"delta={delta:g}, over the target of {epsilon:g}; leave out epsilon to accept the cost, or one of "
            "noise_multiplier and steps (set it to null) to have it solved"
        )
    return Plan(
        mechanism=mechanism.name,
        records=records,
        epsilon=cost,
        target_epsilon=epsilon if epsilon is not None else cost,
        delta=delta,
        noise_multiplier=noise,
        steps=steps,
        batch_size=settings.given("batch_size"),
        sampling_rate=mechanism.sampling_rate,
        accountant=settings.accountant,
        event_noise_multiplier=mechanism.noise_scale / mechanism.sensitivity,
        as_published_epsilon=_as_published(mechanism, steps, delta),
    )


def complete(
    settings: Settings, records: int, image_shape: ImageShape = (1, 28, 28), scale: Scale = "small"
) -> Settings:
    """Fill in what is left out, from public numbers alone: number and shape of the records, ε, scale of the machine.

    For the mechanisms of the paper these are fixed numbers, chosen for `row` at a sound ε = 10 on scikit-learn's digits
    and on MNIST: few rows, since their noise grows with √n, a large λ, a small generator, and the average of its
    weights. For per-record transport they are the automatic plan (docs/research-log.md).
    """
    per_record = issubclass(mechanism_class(settings.mechanism), PerRecordMechanism)
    filled = _automatic(settings, records, math.prod(image_shape), scale) if per_record else _PAPER_MECHANISMS
    return settings.model_copy(
        update={name: value for name, value in filled.items() if getattr(settings, name) is None}
    )


def _automatic(settings: Settings, records: int, dimension: int, scale: Scale) -> dict[str, Any]:
    """The automatic plan of per-record transport."""
    epsilon = settings.epsilon if settings.epsilon is not None else DEFAULT_EPSILON
    noisy = min(1.0, max(0.0, (1.0 - math.log10(epsilon)) / 1.7))  # 0 at ε = 10, 1 at ε = 0.2
    start, end = (40.0 + 60.0 * noisy) / 784 * dimension, (20.0 + 30.0 * noisy) / 784 * dimension
    return {
        "batch_size": max(1.0, min(records / 2, max(0.1 * records, 1000.0), 2.5e5)),
        "clip": 1.0,
        "steps": 2500,
        "rows": 200 if scale == "small" else 1000,
        "debias": 0.75 - 0.4 * noisy,
        # A start that is given holds to the end, unless an end is given too.
        "debias_end": 0.92 - 0.1 * noisy if settings.debias is None else settings.debias,
        "temperature": start,
        "temperature_end": end if settings.temperature is None else settings.temperature,
        # Its part of a squared distance grows with the pixels' part.
        "feature_scale": min(40.0, 10.0 * math.sqrt(dimension / 784)),
        "latent": 12,
        "class_embedding": 4,
        "width": 16 if scale == "small" else 64,
        "learning_rate": 3e-3 * (1.0 + 1.15 * noisy),
        "averaging": 0.99,
        "beta2": 0.99,
    }


def suited_scale(device_type: str) -> Scale:
    """How large a generator and how many atoms a machine should be given: `large` on a GPU."""
    return "large" if device_type == "cuda" else "small"


def default_delta(records: int) -> float:
    """The largest power of ten below 1/records, and at most 1e-5, the δ of the paper's grey image sets."""
    return float(f"1e-{max(5, math.floor(math.log10(records)) + 1)}")


def parse_settings(preset: str | None, overrides: Mapping[str, Any]) -> Settings:
    """A preset (or the defaults) with single settings replaced; strings are converted to the setting's type."""
    if preset is not None and preset not in PRESETS:
        raise UserError(f"unknown preset '{preset}'; choose one of {', '.join(PRESETS)}")
    values = {**(PRESETS[preset] if preset is not None else {}), **overrides}
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            known = ", ".join(Settings.model_fields)
            raise UserError(f"unknown setting '{name}'; known settings: {known}") from None
        message = first["msg"].removeprefix("Value error, ")
        raise UserError(f"setting {name}={first['input']!r}: {message}" if name else message) from None


def _plan_without_privacy(settings: Settings, mechanism: Mechanism, records: int, delta: float) -> Plan:
    if settings.epsilon is not None:
        raise UserError("mechanism 'nonprivate' has no epsilon: leave it out, or choose a private mechanism")
    return Plan(
        mechanism=mechanism.name,
        records=records,
        epsilon=None,
        target_epsilon=None,
        delta=delta,
        noise_multiplier=0.0,
        steps=settings.given("steps"),
        batch_size=settings.given("batch_size"),
        sampling_rate=mechanism.sampling_rate,
        accountant=settings.accountant,
        event_noise_multiplier=None,
        as_published_epsilon=None,
    )


def _as_published(mechanism: Mechanism, steps: int, delta: float) -> float | None:
    recipe = getattr(mechanism, "as_published_event", None)
    return None if recipe is None else epsilon_of(recipe(steps), delta, "rdp")


_PAPER: dict[str, Any] = {
    "mechanism": "row",
    "delta": 1e-5,
    "clip": 0.5,
    "batch_size": 50,
    "debias": 0.4,
    "class_scale": 15,
    "temperature": 0.05,
    "exponent": 1,
    "scaling": 0.5,
    "generator": "dcgan",
    "latent": 12,
    "class_embedding": 4,
    "width": 64,
    "optimizer": "adam",
    "learning_rate_end": 1,
    "averaging": 0,
    "beta1": 0.9,
    "beta2": 0.999,
    "weight_decay": 2e-5,
}
_PAPER_NONPRIVATE: dict[str, Any] = {
    **_PAPER, "mechanism": "nonprivate", "delta": None, "batch_size": 500,
    "learning_rate": 1e-4, "steps": 160_000,
}  # fmt: skip

PRESETS: dict[str, dict[str, Any]] = {
    "digits": {"steps": 1500, "rows": 100, "width": 8, "feature_scale": 0},
    "digits-row": {"mechanism": "row", "temperature": 10, "width": 8},
    "paper-mnist": {
        **_PAPER, "l1_weight": 1, "learning_rate": 1e-4, "noise_multiplier": 1.5, "steps": 160_000,
    },
    "paper-fashion-mnist": {
        **_PAPER, "l1_weight": 3, "learning_rate": 1e-5, "noise_multiplier": 1.9, "steps": 280_000,
    },
    "paper-nonprivate-m1": {**_PAPER_NONPRIVATE, "l1_weight": 1},
    "paper-nonprivate-m3": {**_PAPER_NONPRIVATE, "l1_weight": 3},
}  # fmt: skip
"""Named settings. `digits` makes a first experience on a laptop; the others are the paper's."""
