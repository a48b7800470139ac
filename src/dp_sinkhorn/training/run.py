"""A run: records, settings and a folder become a release.

RUN/release/    publishable, written when training is complete
RUN/private/    settings.json, ledger.jsonl, checkpoint.safetensors, log.jsonl; mode 0700, never publish
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import nn

from dp_sinkhorn import __version__
from dp_sinkhorn.accounting import Budget, Ledger, encode_event
from dp_sinkhorn.errors import UserError
from dp_sinkhorn.generators import Generator, GeneratorSpec, build_generator, generator_class
from dp_sinkhorn.images import from_pixels
from dp_sinkhorn.mechanisms import Barrier, Mechanism, OsEntropy, Randomness, SeededForDebugging
from dp_sinkhorn.records import PrivateRecords
from dp_sinkhorn.release import PrivacyStatement, Release, ReleasedEvent, ReleaseInfo, write_release
from dp_sinkhorn.release.format import FORMAT_VERSION, INFO_FILE, up
from dp_sinkhorn.release.load import read_info
from dp_sinkhorn.release.write import check_target
from dp_sinkhorn.settings import Plan, Settings, complete, plan, suited_scale
from dp_sinkhorn.training.checkpoint import load_checkpoint, save_checkpoint
from dp_sinkhorn.training.loop import Progress, Trainer

_NOTICE = "PRIVATE: this folder belongs to a private run; never publish it"


class Interrupted(Exception):
    """Training stopped early in good order; the run can be resumed."""

    def __init__(self, step: int, steps: int) -> None:
        super().__init__(f"stopped after step {step} of {steps}")
        self.step = step
        self.steps = steps


class RunConfiguration(BaseModel):
    """What a run was started with; a resumed run must be started with the same."""

    model_config = ConfigDict(frozen=True)

    notice: str = _NOTICE
    package_version: str = __version__
    settings: Settings
    completed: Settings
    plan: Plan
    image_shape: tuple[int, int, int]
    classes: list[str]
    classes_declared: bool
    fingerprint_key: str
    fingerprint: str

    @property
    def checksum(self) -> str:
        """Of all that decides the run. Not of the fingerprint: the checksum ends up in the release's."""
        decisive = self.model_dump_json(exclude={"fingerprint_key", "fingerprint"})
        return hashlib.sha256(decisive.encode()).hexdigest()


@dataclass(frozen=True)
class RunFolder:
    """The files of a run."""

    path: Path

    @property
    def release(self) -> Path:
        """What may be published."""
        return self.path / "release"

    @property
    def private(self) -> Path:
        """What must never be."""
        return self.path / "private"

    @property
    def configuration(self) -> Path:
        """Settings and plan of the run."""
        return self.private / "settings.json"

    @property
    def ledger(self) -> Path:
        """What has been spent."""
        return self.private / "ledger.jsonl"

    @property
    def checkpoint(self) -> Path:
        """Generator and optimiser after the last block."""
        return self.private / "checkpoint.safetensors"

    @property
    def log(self) -> Path:
        """Times and progress."""
        return self.private / "log.jsonl"

    def start(self, configuration: RunConfiguration) -> None:
        """Make the folder for a new run."""
        if self.private.exists():
            raise UserError(f"{self.path}: holds a run already; add --resume to go on with it, or name a new folder")
        check_target(self.release)  # before anything is spent
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.private.mkdir(mode=0o700)
            self.configuration.write_text(configuration.model_dump_json(indent=2) + "\n", encoding="utf-8")
            self.ledger.touch()
            self.log.write_text(json.dumps({"notice": _NOTICE}) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"{self.path}: the run's folder cannot be made ({error.strerror})") from None

    def stored_configuration(self) -> RunConfiguration:
        """The configuration that the run was started with."""
        try:
            return RunConfiguration.model_validate_json(self.configuration.read_bytes())
        except OSError:
            raise UserError(f"{self.path}: there is no run to resume here; leave out --resume to start one") from None
        except ValidationError:
            raise UserError(f"{self.configuration}: is damaged or of another version; start a new run") from None

    def note(self, **entry: Any) -> None:
        """Append a line to the log."""
        with self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time": round(time.time(), 3), **entry}) + "\n")


def train(
    records: PrivateRecords,
    settings: Settings | None,
    out: Path | None = None,
    *,
    resume: bool = False,
    on_plan: Callable[[Plan, int], None] = lambda plan, done: None,
    on_step: Callable[[int], None] = lambda _: None,
    on_block: Callable[[Progress], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Release:
    """Train a generator and, with `out`, write its run folder.

    Args:
        records: the private records.
        settings: what to do; missing pieces of ε, σ and T are solved for. None takes those of the run to resume.
        out: the run's folder; None keeps everything in memory, and such a run cannot be resumed.
        resume: go on with the run in `out`.
        on_plan: called once before training, with the plan and the steps done already.
        on_step: called with the number of steps done.
        on_block: called with the ε spent, about a hundred times in a run.
        should_stop: asked after each step.

    Raises:
        Interrupted: `should_stop` said so. With `out`, the run can be resumed.
    """
    folder = RunFolder(out) if out is not None else None
    configuration = _configure(records, settings, folder if resume else None)
    mechanism = _planned_mechanism(configuration)
    mechanism.check(records.count, len(records.classes))
    if folder is not None and not resume:
        folder.start(configuration)
    run_plan = configuration.plan
    ledger = Ledger(
        Budget(run_plan.target_epsilon, run_plan.delta, run_plan.accountant),
        folder.ledger if folder else None,
        configuration.checksum,
    )
    try:
        if folder is not None:
            _refuse_an_older_ledger(ledger, folder)
        generator = build_generator(_spec(configuration), configuration.completed.seed).to(records.device)
        barrier = Barrier(mechanism, records, _randomness(configuration.completed, ledger), ledger)
        trainer = Trainer(generator, barrier, configuration.completed, run_plan.steps)
        if folder is not None and folder.checkpoint.exists():
            head = load_checkpoint(
                folder.checkpoint, generator, trainer.averaged.generator, trainer.optimizer, trainer.companion
            )
            if not ledger.knows(head):
                raise _older_ledger(folder, folder.checkpoint)
        on_plan(run_plan, ledger.releases)

        def end_of_block(progress: Progress) -> None:
            if folder is not None:
                save_checkpoint(
                    folder.checkpoint,
                    generator,
                    trainer.averaged.generator,
                    trainer.optimizer,
                    trainer.companion,
                    ledger.head,
                )
                folder.note(step=progress.step, steps=progress.steps, epsilon=progress.epsilon)
            on_block(progress)

        if not trainer.run(on_step, end_of_block, should_stop):
            raise Interrupted(ledger.releases, run_plan.steps)
        release = finish(trainer.averaged.generator, configuration, mechanism, ledger, trainer.companion)
    finally:
        ledger.close()
    if folder is not None:
        write_release(release, folder.release)
    return release


def _refuse_an_older_ledger(ledger: Ledger, folder: RunFolder) -> None:
    """A release that was written from this folder is paid for in a ledger that knows its head, and in no other."""
    written = folder.release / INFO_FILE
    if written.exists() and not ledger.knows(read_info(written).privacy.ledger):
        raise _older_ledger(folder, written)


def _older_ledger(folder: RunFolder, newer: Path) -> UserError:
    return UserError(
        f"{folder.ledger}: is older than {newer}, so it does not hold what that has cost; "
        "the run cannot go on without the ledger it was written with"
    )


def finish(
    generator: Generator,
    configuration: RunConfiguration,
    mechanism: Mechanism,
    ledger: Ledger,
    companion: nn.Module | None,
) -> Release:
    """Put the guarantee, as the ledger counts it, and the probe, where there is one, beside the generator."""
    generator.eval()
    public = torch.Generator().manual_seed(configuration.completed.seed)
    with torch.no_grad():
        labeller = mechanism.make_labeller(companion, lambda labels: from_pixels(generator.draw(labels, public)))
    info = ReleaseInfo(
        format_version=FORMAT_VERSION,
        package_version=__version__,
        architecture=configuration.completed.generator,
        arguments=_spec(configuration).sizes,
        image_shape=configuration.image_shape,  # type: ignore[arg-type]  # checked by pydantic
        classes=configuration.classes,
        latent=configuration.completed.given("latent"),
        labels="generator" if labeller is None else "probe",
        privacy=_statement(configuration, mechanism, ledger),
    )
    return Release(info, generator, labeller)


def _configure(records: PrivateRecords, settings: Settings | None, resumed: RunFolder | None) -> RunConfiguration:
    """The configuration of a new run, or that of the run to resume if it is the same."""
    if resumed is None:
        assert settings is not None, "a new run needs settings"
        key = secrets.token_bytes(32)
        stated = settings.nominal_records if settings.nominal_records is not None else records.count
        return RunConfiguration(
            settings=settings,
            completed=complete(settings, stated, records.shape, suited_scale(records.device.type)),
            plan=plan(settings, stated),
            image_shape=records.shape,
            classes=list(records.classes),
            classes_declared=records.classes_declared,
            fingerprint_key=key.hex(),
            fingerprint=records.fingerprint(key),
        )
    stored = resumed.stored_configuration()
    if not resumed.ledger.exists():
        raise UserError(f"{resumed.ledger}: is missing, so what was spent is not known; the run cannot go on")
    if stored.package_version != __version__:
        raise UserError(
            f"{resumed.path}: was started with dp-sinkhorn {stored.package_version}, and this is {__version__}; "
            "resume it with the version it was started with"
        )
    if records.fingerprint(bytes.fromhex(stored.fingerprint_key)) != stored.fingerprint:
        raise UserError(f"{resumed.path}: was started on other records; resume it with the same source")
    for name, value in settings or ():
        if value != getattr(stored.settings, name):
            before = getattr(stored.settings, name)
            raise UserError(
                f"{resumed.path}: was started with {name}={'its default' if before is None else before}, not {value}; "
                "resume it with the same settings, or with none"
            )
    return stored


def _planned_mechanism(configuration: RunConfiguration) -> Mechanism:
    """The mechanism with the noise that the plan solved for."""
    run_plan = configuration.plan
    settings = configuration.completed
    if run_plan.noise_multiplier > 0:
        settings = settings.model_copy(update={"noise_multiplier": run_plan.noise_multiplier})
    return settings.make_mechanism(run_plan.records)


def _randomness(settings: Settings, ledger: Ledger) -> Randomness:
    if settings.insecure_debug_noise_seed is None:
        return OsEntropy()
    return SeededForDebugging(settings.insecure_debug_noise_seed, first_release=ledger.releases)


def _spec(configuration: RunConfiguration) -> GeneratorSpec:
    settings = configuration.completed
    return GeneratorSpec(
        architecture=settings.generator,
        image_shape=configuration.image_shape,
        classes=len(configuration.classes),
        latent=settings.given("latent"),
        sizes={
            name: getattr(settings, name, default)
            for name, default in generator_class(settings.generator).sizes.items()
        },
    )


def _statement(configuration: RunConfiguration, mechanism: Mechanism, ledger: Ledger) -> PrivacyStatement:
    """The guarantee, from the ledger alone: what was counted, not what was planned."""
    settings, run_plan = configuration.settings, configuration.plan
    spent = ledger.epsilon()
    private = settings.is_private() and math.isfinite(spent)
    epsilon = spent if private else None
    if private:
        sentence = (
            f"These images are synthetic. Their generator was trained under ({up(spent)}, {run_plan.delta!r})-"
            f"differential privacy for adding or removing any one of {run_plan.records} records"
            + ("." if configuration.classes_declared else ", which labels occur among them being known.")
        )
    elif settings.insecure_debug_noise_seed is not None:
        sentence = (
            "NO PRIVACY GUARANTEE: the noise was drawn from a fixed seed, for debugging. Who knows the seed can "
            "remove the noise. Do not publish this."
        )
    else:
        sentence = (
            "NO PRIVACY GUARANTEE: the generator was trained without any protection and may reveal the records. "
            "Do not publish this."
        )
    return PrivacyStatement(
        private=private,
        epsilon=epsilon,
        delta=run_plan.delta if private else None,
        accountant=run_plan.accountant,
        mechanism=run_plan.mechanism,
        sampling_rate=run_plan.sampling_rate,
        noise_multiplier=run_plan.noise_multiplier,
        steps=ledger.releases,
        records=run_plan.records,
        randomness="os-entropy" if settings.insecure_debug_noise_seed is None else "seeded",
        classes_declared=configuration.classes_declared,
        ledger=ledger.head,
        events=[ReleasedEvent(event=encode_event(event), count=count) for event, count in ledger.parts()],
        statement=sentence,
    )
