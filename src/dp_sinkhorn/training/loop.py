"""Algorithm 1 of the paper, for any mechanism."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dp_sinkhorn.devices import suited_threads
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
        self._device = next(generator.parameters()).device

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
        values = self.barrier.mechanism.batch_size * math.prod(self.generator.image_shape)
        with suited_threads(values):
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
            epsilon = ledger.epsilon()
            on_block(Progress(ledger.releases, self.steps, epsilon if math.isfinite(epsilon) else None))
            if stopped:
                break
        return ledger.releases >= self.steps

    def _step(self, step: int) -> None:
        batch = self._generate(step)
        gradient = self.barrier.release(batch)
        self.optimizer.zero_grad(set_to_none=True)
        gradient.backpropagate(batch)
        self.optimizer.step()

    def _generate(self, step: int) -> GeneratedBatch:
        """Z ~ Unif(0, 1) and labels ~ Unif{0, …, L-1}, fixed by the public seed and the step."""
        public = public_generator(self.settings.seed, step)
        labels = torch.randint(self.generator.classes, (self.barrier.mechanism.batch_size,), generator=public)
        labels = labels.to(self._device)
        pixels: Tensor = self.generator.draw(labels, public).flatten(1)
        return GeneratedBatch(pixels, labels, tuple(self.generator.parameters()))


def public_generator(seed: int, step: int) -> torch.Generator:
    """A stream of public randomness for one step, so that a resumed run draws what an unbroken one draws."""
    key = np.random.SeedSequence([seed, step]).generate_state(1, np.uint32)[0]
    return torch.Generator().manual_seed(int(key))


def make_optimizer(generator: Generator, settings: Settings) -> torch.optim.Optimizer:
    """Adam or SGD on the generator's parameters."""
    parameters, rate, decay = generator.parameters(), settings.learning_rate, settings.weight_decay
    if settings.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=rate, momentum=settings.beta1, weight_decay=decay)
    return torch.optim.Adam(parameters, lr=rate, betas=(settings.beta1, settings.beta2), weight_decay=decay)
