"""Algorithm 1 of the paper, for any mechanism."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dp_sinkhorn.accounting import Ledger
from dp_sinkhorn.devices import suited_precision, suited_threads
from dp_sinkhorn.generators import Generator
from dp_sinkhorn.mechanisms import Barrier, GeneratedBatch
from dp_sinkhorn.settings import Settings

_BLOCKS = 100
_MAX_BLOCK = 1000


@dataclass(frozen=True)
class Progress:
    """Where a run stands. All of it is public: it follows from the settings and the clock."""

    step: int
    steps: int
    epsilon: float | None


class Trainer:
    """A generator, its optimiser and the barrier it learns through.

    Steps are counted by the ledger: step t is the t-th release it holds. Releases are reserved in blocks of at
    most a hundredth of the run, and each block ends in a checkpoint, so a crash costs at most one block: its
    releases are spent, and the run ends with that many updates fewer, never with more than T releases.
    """

    def __init__(self, generator: Generator, barrier: Barrier, settings: Settings, steps: int) -> None:
        self.generator = generator
        self.barrier = barrier
        self.settings = settings
        self.steps = steps
        self.optimizer = make_optimizer(generator, settings)
        self.averaged = AveragedGenerator(generator, settings.given("averaging"))
        self._device = next(generator.parameters()).device
        companion = barrier.mechanism.make_companion(generator.image_shape, generator.classes)
        self.companion = companion.to(self._device) if companion is not None else None
        self._own_labels = barrier.mechanism.draw_own_labels(generator.classes).to(self._device)
        self._values = barrier.mechanism.batch_size * math.prod(generator.image_shape)
        precision = suited_precision(self._device, self._values) if settings.precision == "auto" else settings.precision
        self._low_precision = precision == "bfloat16"

    def run(
        self,
        on_step: Callable[[int], None] = lambda _: None,
        on_block: Callable[[Progress], None] = lambda _: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Train until the ledger holds T releases.

        Args:
            on_step: called after each step with the number of steps done.
            on_block: called after each block, when the ledger is settled: the moment for a checkpoint.
            should_stop: asked after each step; True settles the ledger and returns early.

        Returns:
            Whether all T steps are done.
        """
        with suited_threads(self._values):
            return self._run(on_step, on_block, should_stop)

    def _run(
        self,
        on_step: Callable[[int], None],
        on_block: Callable[[Progress], None],
        should_stop: Callable[[], bool],
    ) -> bool:
        ledger = self.barrier.ledger
        block = min(_MAX_BLOCK, math.ceil(self.steps / _BLOCKS))
        self.generator.train()
        meter = _Meter(ledger)
        if ledger.releases < self.steps:
            self.barrier.fits(self.steps - ledger.releases)
        while (first := ledger.releases) < self.steps:
            count = min(block, self.steps - first)
            self.barrier.reserve(count)
            stopped = False
            for step in range(first, first + count):
                self._step(step)
                on_step(step + 1)
                if stopped := should_stop():
                    break
            self.barrier.settle()
            on_block(Progress(ledger.releases, self.steps, meter.read(last=ledger.releases >= self.steps or stopped)))
            if stopped:
                break
        return ledger.releases >= self.steps

    def _step(self, step: int) -> None:
        batch = self._generate(step)
        gradient = self.barrier.release(batch)
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate(step)
        self.optimizer.zero_grad(set_to_none=True)
        gradient.backpropagate(batch)
        self.optimizer.step()
        self.averaged.update(self.generator, step)

    def _learning_rate(self, step: int) -> float:
        """Linear from the setting down to its final fraction; a function of the step, so resuming needs no state."""
        fall = (1.0 - self.settings.learning_rate_end) * step / self.steps
        rate: float = self.settings.given("learning_rate")
        return rate * (1.0 - fall)

    def _generate(self, step: int) -> GeneratedBatch:
        """Z ~ Unif(0, 1) and the mechanism's labels, fixed by the public seed and the step."""
        public = public_generator(self.settings.seed, step)
        labels = self.barrier.mechanism.draw_labels(self.generator.classes, public).to(self._device)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._low_precision):
            images: Tensor = self.generator.draw(labels, public)
            own = None
            if len(self._own_labels):
                with torch.no_grad():
                    own = self.generator.draw(self._own_labels, public)
        return GeneratedBatch(
            # From here on float32: costs, clipping and noise never see a shorter format.
            images.float().flatten(1),
            labels,
            tuple(self.generator.parameters()),
            own_pixels=own.float().flatten(1) if own is not None else None,
            own_labels=self._own_labels,
            progress=step / self.steps,
            companion=self.companion,
        )


class AveragedGenerator:
    """An exponential running average of the weights: the generator that is released.

    Post-processing, and a good one under noise: it averages over the steps that the noise shakes. With decay 0 it
    is the trained generator itself. Statistics of batch normalisation are taken over as they are.
    """

    def __init__(self, generator: Generator, decay: float) -> None:
        self.decay = decay
        self.generator = copy.deepcopy(generator).requires_grad_(False) if decay > 0.0 else generator

    @torch.no_grad()
    def update(self, current: Generator, step: int) -> None:
        """Move the average towards the weights after `step`; early steps count more, so the start is forgotten."""
        if self.decay > 0.0:
            decay = min(self.decay, (1.0 + step) / (10.0 + step))
            for average, parameter in zip(self.generator.parameters(), current.parameters(), strict=True):
                average.lerp_(parameter, 1.0 - decay)
            for kept, buffer in zip(self.generator.buffers(), current.buffers(), strict=True):
                kept.copy_(buffer)


class _Meter:
    """Reads ε off the ledger, but spends at most about a twentieth of the time on it.

    In between it repeats its last reading: for display only, the budget is enforced elsewhere.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._reading: float | None = 0.0
        self._next = 0.0

    def read(self, last: bool) -> float | None:
        """ε spent, None if unbounded; `last` asks for the exact figure."""
        start = time.monotonic()
        if last or start >= self._next:
            epsilon = self._ledger.epsilon()
            self._reading = epsilon if math.isfinite(epsilon) else None
            self._next = time.monotonic() + 20.0 * (time.monotonic() - start)
        return self._reading


def public_generator(seed: int, step: int) -> torch.Generator:
    """A stream of public randomness for one step, so that a resumed run draws what an unbroken one draws."""
    key = np.random.SeedSequence([seed, step]).generate_state(1, np.uint32)[0]
    return torch.Generator().manual_seed(int(key))


def make_optimizer(generator: Generator, settings: Settings) -> torch.optim.Optimizer:
    """Adam or SGD on the generator's parameters."""
    parameters, rate, decay = generator.parameters(), settings.given("learning_rate"), settings.weight_decay
    if settings.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=rate, momentum=settings.beta1, weight_decay=decay)
    return torch.optim.Adam(parameters, lr=rate, betas=(settings.beta1, settings.given("beta2")), weight_decay=decay)
