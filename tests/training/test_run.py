"""Runs: learning, interruption, resuming, budgets, and what a run folder holds."""

import json
import shutil
import stat

import dp_accounting
import pytest
import torch
from scipy import stats

from dp_sinkhorn.accounting import Budget, Ledger, compose, epsilon_of
from dp_sinkhorn.errors import BudgetExceededError, UserError
from dp_sinkhorn.generators import GeneratorSpec, build_generator
from dp_sinkhorn.images import from_arrays
from dp_sinkhorn.mechanisms import Barrier, OsEntropy, Randomness
from dp_sinkhorn.records import PrivateRecords
from dp_sinkhorn.release import load_release
from dp_sinkhorn.release.format import up
from dp_sinkhorn.training import Interrupted, RunFolder, Trainer, train
from tests.toy import records, small_settings, stripes

PRIVATE = ["row", "batch", "parameter"]


def stop_after(steps: int):
    """A `should_stop` that says yes after so many steps of this process."""
    seen = iter(range(1, 10**9))
    return lambda: next(seen) >= steps


def spent(folder) -> list:
    ledger = Ledger(Budget(None, 1e-5), RunFolder(folder).ledger)
    parts = ledger.parts()
    ledger.close()
    return parts


@pytest.mark.parametrize("mechanism", [*PRIVATE, "per_record", "nonprivate"])
def test_every_mechanism_trains_to_a_release(tmp_path, mechanism: str) -> None:
    epsilon = None if mechanism == "nonprivate" else 3.0
    train(records(), small_settings(mechanism=mechanism, epsilon=epsilon), tmp_path / "run")
    release = load_release(tmp_path / "run")
    assert release.privacy.steps == 20
    assert release.privacy.mechanism == mechanism
    assert release.privacy.private == (mechanism != "nonprivate")
    if epsilon is not None:
        assert 0.9 * epsilon < release.privacy.epsilon <= epsilon
        assert f"({up(release.privacy.epsilon)}, 1e-05)-differential privacy" in release.privacy.statement
    else:
        assert release.privacy.epsilon is None
        assert release.privacy.statement.startswith("NO PRIVACY GUARANTEE")
        assert "NO PRIVACY GUARANTEE" in (tmp_path / "run" / "release" / "CARD.md").read_text()


def test_the_stated_epsilon_is_that_of_the_recorded_events(tmp_path) -> None:
    from dp_sinkhorn.accounting import decode_event

    release = train(records(), small_settings(epsilon=2.0), tmp_path / "run")
    parts = [(decode_event(part.event), part.count) for part in release.privacy.events]
    assert epsilon_of(compose(parts), release.privacy.delta) == release.privacy.epsilon


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_the_loop_learns_the_classes(optimizer: str) -> None:
    rate = {"adam": 0.02, "sgd": 1e-3}[optimizer]
    settings = small_settings(
        mechanism="nonprivate", steps=250, learning_rate=rate, width=4, batch_size=24, optimizer=optimizer
    )
    release = train(records(), settings)
    images, labels = release.sample(200, seed=0)
    for label, half in ((0, images[labels == 0][:, :4]), (1, images[labels == 1][:, :, :4])):
        others = images[labels == label].mean() * 2 - half.mean()
        assert half.mean() > others + 80


def test_a_resumed_run_ends_with_the_ledger_of_an_unbroken_one(tmp_path) -> None:
    settings = small_settings(epsilon=3.0)
    train(records(), settings, tmp_path / "unbroken")
    for steps in (1, 6, 7):
        with pytest.raises(Interrupted):
            train(records(), settings, tmp_path / "broken", resume=steps != 1, should_stop=stop_after(steps))
    assert not (tmp_path / "broken" / "release").exists(), "an unfinished run has nothing to publish"
    assert sum(count for _, count in spent(tmp_path / "broken")) == 14
    train(records(), None, tmp_path / "broken", resume=True)
    assert spent(tmp_path / "broken") == spent(tmp_path / "unbroken")
    released = [load_release(tmp_path / name).privacy for name in ("broken", "unbroken")]
    assert released[0].model_copy(update={"ledger": released[1].ledger}) == released[1]


@pytest.mark.parametrize("seed", [None, 3])
def test_noise_is_independent_between_steps_and_across_a_resume(tmp_path, monkeypatch, seed) -> None:
    """Two-sided tests at a false-alarm rate of 1e-6 each, on the noise that a broken run really drew."""
    drawn = []
    original = Randomness.normal

    def recorded(self, shape, device):
        drawn.append(original(self, shape, device))
        return drawn[-1]

    monkeypatch.setattr(Randomness, "normal", recorded)
    settings = small_settings(noise_multiplier=30, steps=12, insecure_debug_noise_seed=seed)
    with pytest.raises(Interrupted):
        train(records(), settings, tmp_path / "run", should_stop=stop_after(6))
    train(records(), None, tmp_path / "run", resume=True)
    assert len(drawn) == 12
    noise = torch.stack([values.flatten() for values in drawn])
    count = noise.shape[1]
    limit = stats.norm.isf(0.5e-6)
    correlations = torch.corrcoef(noise)[torch.triu(torch.ones(12, 12), 1) > 0] * count**0.5
    assert correlations.abs().max() < stats.norm.isf(0.5e-6 / len(correlations))
    assert abs((noise.var().item() - 1) * (noise.numel() / 2) ** 0.5) < limit
    assert len({tuple(values.tolist()) for values in noise}) == 12


def test_a_crash_inside_a_block_is_counted_in_full_and_never_twice_used(tmp_path) -> None:
    settings = small_settings(epsilon=3.0, steps=300)  # blocks of three releases

    def crash(step: int) -> None:
        if step == 8:
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        train(records(), settings, tmp_path / "run", on_step=crash)
    assert spent(tmp_path / "run")[0][1] == 9, "releases 7, 8 and 9 were reserved, so they count"
    steps = []
    train(records(), settings, tmp_path / "run", resume=True, on_step=steps.append)
    assert steps == list(range(10, 301))
    assert spent(tmp_path / "run")[0][1] == 300


def test_resuming_continues_from_the_checkpoint(tmp_path) -> None:
    settings = small_settings(mechanism="nonprivate", steps=40, averaging=0.9)
    states = {}
    with pytest.raises(Interrupted):
        train(records(), settings, tmp_path / "run", should_stop=stop_after(20))
    from safetensors.torch import load_file

    states["stopped"] = load_file(RunFolder(tmp_path / "run").checkpoint)
    assert {name.split(".")[0] for name in states["stopped"]} == {"generator", "averaged", "optimizer"}
    with pytest.raises(Interrupted):
        train(records(), settings, tmp_path / "run", resume=True, should_stop=stop_after(1))
    resumed = load_file(RunFolder(tmp_path / "run").checkpoint)
    moved = max(
        (resumed[name] - value).abs().max().item() for name, value in states["stopped"].items() if "weight" in name
    )
    assert 0 < moved <= 1.1 * settings.learning_rate * 5, "one Adam step from where it stopped"
    assert resumed["optimizer.0.step"] == states["stopped"]["optimizer.0.step"] + 1


def test_the_average_is_released_and_the_rate_falls(tmp_path) -> None:
    from safetensors.torch import load_file

    settings = small_settings(mechanism="nonprivate", averaging=0.95, learning_rate=0.01, learning_rate_end=0.1)
    train(records(), settings, tmp_path / "run")
    checkpoint = load_file(RunFolder(tmp_path / "run").checkpoint)
    released = load_file(tmp_path / "run" / "release" / "generator.safetensors")["project.weight"]
    assert torch.equal(released, checkpoint["averaged.project.weight"])
    assert not torch.equal(released, checkpoint["generator.project.weight"])
    barrier = Barrier(settings.make_mechanism(60), records(), OsEntropy(), Ledger(Budget(None, 1e-5)))
    spec = GeneratorSpec("dcgan", (1, 8, 8), 2, 3, {"width": 2, "class_embedding": 2})
    trainer = Trainer(build_generator(spec, 0), barrier, settings, steps=20)
    assert [trainer._learning_rate(step) for step in (0, 10, 20)] == pytest.approx([0.01, 0.0055, 0.001])


@pytest.mark.parametrize("mechanism", [*PRIVATE, "per_record"])
def test_training_cannot_take_a_step_that_would_pass_the_budget(mechanism: str) -> None:
    settings = small_settings(mechanism=mechanism, noise_multiplier=30 if mechanism == "row" else 8)
    one = settings.make_mechanism(60)
    limit = epsilon_of(compose([(one.event, 7)]), 1e-5)
    spec = GeneratorSpec("dcgan", (1, 8, 8), 2, 3, {"width": 2, "class_embedding": 2})
    barrier = Barrier(one, records(), OsEntropy(), Ledger(Budget(limit, 1e-5)))
    done = []
    with pytest.raises(BudgetExceededError):
        Trainer(build_generator(spec, 0), barrier, settings, steps=20).run(on_step=done.append)
    assert done == list(range(1, 8))
    assert barrier.ledger.epsilon() <= limit


def test_public_randomness_follows_the_seed_and_private_randomness_does_not() -> None:
    def generated(seed: int) -> torch.Tensor:
        barrier = Barrier(
            small_settings(noise_multiplier=5).make_mechanism(60), records(), OsEntropy(), Ledger(Budget(None, 1e-5))
        )
        spec = GeneratorSpec("dcgan", (1, 8, 8), 2, 3, {"width": 2, "class_embedding": 2})
        return Trainer(build_generator(spec, seed), barrier, small_settings(seed=seed), 5)._generate(3).pixels.detach()

    assert torch.equal(generated(1), generated(1))
    assert not torch.equal(generated(1), generated(2))
    twice = [train(records(), small_settings(epsilon=3.0)).sample(10, seed=0)[0] for _ in range(2)]
    assert (twice[0] != twice[1]).any(), "the same seed must not give the same noise"


def test_a_run_with_seeded_noise_claims_nothing() -> None:
    settings = small_settings(epsilon=3.0, insecure_debug_noise_seed=1)
    twice = [train(records(), settings) for _ in range(2)]
    assert (twice[0].sample(10, seed=0)[0] == twice[1].sample(10, seed=0)[0]).all()
    privacy = twice[0].privacy
    assert (privacy.private, privacy.epsilon, privacy.delta, privacy.randomness) == (False, None, None, "seeded")
    assert "NO PRIVACY GUARANTEE" in privacy.statement


def test_the_run_folder_holds_what_the_contract_names(tmp_path) -> None:
    train(records(), small_settings(epsilon=3.0), tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    assert {path.name for path in folder.path.iterdir()} == {"release", "private"}
    assert {path.name for path in folder.release.iterdir()} == {
        "generator.safetensors", "release.json", "samples.png", "CARD.md",
    }  # fmt: skip
    assert {path.name for path in folder.private.iterdir()} == {
        "ledger.jsonl", "checkpoint.safetensors", "log.jsonl", "settings.json",
    }  # fmt: skip
    assert stat.S_IMODE(folder.private.stat().st_mode) == 0o700
    assert "PRIVATE" in folder.log.read_text().splitlines()[0]
    info = json.loads((folder.release / "release.json").read_text())
    assert set(info) >= {
        "format_version",
        "package_version",
        "architecture",
        "image_shape",
        "classes",
        "latent",
        "privacy",
    }
    assert set(info["privacy"]) >= {
        "epsilon", "delta", "neighbouring", "accountant", "mechanism", "sampling_rate", "noise_multiplier", "steps",
        "records", "randomness",
    }  # fmt: skip
    assert info["privacy"]["neighbouring"] == "add-or-remove-one"
    assert info["privacy"]["randomness"] == "os-entropy"
    assert not any(b"pickle" in path.read_bytes() for path in folder.release.iterdir())


def test_a_ledger_older_than_the_checkpoint_is_refused(tmp_path) -> None:
    settings = small_settings(noise_multiplier=50, steps=200)
    ledger = RunFolder(tmp_path / "run").ledger
    with pytest.raises(Interrupted):
        train(records(), settings, tmp_path / "run", should_stop=stop_after(60))
    whole = ledger.read_text()
    ledger.write_text("".join(whole.splitlines(keepends=True)[:10]))
    with pytest.raises(UserError, match=r"is older than .*checkpoint.safetensors"):
        train(records(), None, tmp_path / "run", resume=True)
    ledger.unlink()
    with pytest.raises(UserError, match=r"ledger.jsonl: is missing"):
        train(records(), None, tmp_path / "run", resume=True)
    ledger.write_text(whole)
    assert train(records(), None, tmp_path / "run", resume=True).privacy.steps == 200


def test_a_run_folder_that_was_put_back_to_an_earlier_state_is_refused(tmp_path) -> None:
    settings = small_settings(noise_multiplier=50)
    with pytest.raises(Interrupted):
        train(records(), settings, tmp_path / "run", should_stop=stop_after(10))
    shutil.copytree(tmp_path / "run" / "private", tmp_path / "copy")
    train(records(), None, tmp_path / "run", resume=True)
    shutil.rmtree(tmp_path / "run" / "private")
    shutil.copytree(tmp_path / "copy", tmp_path / "run" / "private")
    with pytest.raises(UserError, match=r"is older than .*release.json"):
        train(records(), None, tmp_path / "run", resume=True)


def test_settings_cannot_change_under_the_ledger(tmp_path) -> None:
    with pytest.raises(Interrupted):
        train(records(), small_settings(insecure_debug_noise_seed=7, epsilon=3.0), tmp_path / "run",
              should_stop=stop_after(10))  # fmt: skip
    path = RunFolder(tmp_path / "run").configuration
    stored = json.loads(path.read_text())
    for change in (
        {"settings": {**stored["settings"], "insecure_debug_noise_seed": None}},
        {"plan": {**stored["plan"], "target_epsilon": 30.0}},
        {"plan": {**stored["plan"], "steps": 40}},
        {"plan": {**stored["plan"], "delta": 0.5}},
    ):
        path.write_text(json.dumps({**stored, **change}))
        with pytest.raises(UserError, match="was begun with other settings"):
            train(records(), None, tmp_path / "run", resume=True)
    path.write_text(json.dumps({**stored, "package_version": "0.0.9"}))
    with pytest.raises(UserError, match=r"was started with dp-sinkhorn 0.0.9"):
        train(records(), None, tmp_path / "run", resume=True)
    path.write_text(json.dumps(stored))
    assert train(records(), None, tmp_path / "run", resume=True).privacy.randomness == "seeded"


def test_the_statement_counts_what_the_ledger_holds_and_not_what_was_planned(tmp_path) -> None:
    settings = small_settings(noise_multiplier=50)
    with pytest.raises(Interrupted):
        train(records(), settings, tmp_path / "run", should_stop=stop_after(10))
    path = RunFolder(tmp_path / "run").ledger
    ledger = Ledger(Budget(None, 1e-5), path)
    ledger.reserve(settings.make_mechanism(60).event, 5)  # a block that a crash left behind
    ledger.reserve(dp_accounting.GaussianDpEvent(0.9), 1)
    ledger.close()
    with pytest.raises(BudgetExceededError):
        train(records(), None, tmp_path / "run", resume=True)
    ledger = Ledger(Budget(None, 1e-5), path)
    ledger.reserve(settings.make_mechanism(60).event, 4)
    expected = ledger.epsilon()
    ledger.close()
    release = train(records(), None, tmp_path / "run", resume=True)
    assert release.privacy.steps == 20
    assert release.privacy.epsilon == expected
    assert len(release.privacy.events) == 2


def test_other_records_of_the_same_number_are_refused(tmp_path) -> None:
    data = stripes()
    with pytest.raises(Interrupted):
        train(PrivateRecords(data), small_settings(epsilon=3.0), tmp_path / "run", should_stop=stop_after(2))
    data.images[7, 0, 3, 3] ^= 1
    with pytest.raises(UserError, match="was started on other records"):
        train(PrivateRecords(data), None, tmp_path / "run", resume=True)
    data.images[7, 0, 3, 3] ^= 1
    train(PrivateRecords(data), None, tmp_path / "run", resume=True)
    assert RunFolder(tmp_path / "run").release.exists()


def test_classes_read_off_the_labels_are_said_to_be(tmp_path) -> None:
    data = stripes()
    declared = train(PrivateRecords(data), small_settings(epsilon=3.0, steps=2)).privacy
    read_off = PrivateRecords(from_arrays(data.images, data.labels))
    privacy = train(read_off, small_settings(epsilon=3.0, steps=2), tmp_path / "run").privacy
    assert (declared.classes_declared, privacy.classes_declared) == (True, False)
    assert privacy.statement.endswith("which labels occur among them being known.")
    assert "outside the guarantee" in (tmp_path / "run" / "release" / "CARD.md").read_text()


def test_a_nominal_number_of_records_replaces_the_true_one(tmp_path) -> None:
    release = train(records(), small_settings(epsilon=3.0, nominal_records=100), tmp_path / "run")
    assert release.privacy.records == 100
    assert release.privacy.sampling_rate == 12 / 100
    assert "60" not in (tmp_path / "run" / "release" / "CARD.md").read_text()


def test_a_run_beyond_the_proof_is_refused_before_anything_exists(tmp_path) -> None:
    with pytest.raises(UserError, match="takes at most 1024 atoms of each class"):
        train(records(), small_settings(epsilon=3.0, rows=3000), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_misuse_of_run_folders_is_explained(tmp_path) -> None:
    settings = small_settings(epsilon=3.0)
    with pytest.raises(UserError, match="there is no run to resume here"):
        train(records(), settings, tmp_path / "none", resume=True)
    train(records(), settings, tmp_path / "run")
    with pytest.raises(UserError, match="holds a run already; add --resume"):
        train(records(), settings, tmp_path / "run")
    with pytest.raises(UserError, match=r"was started with clip=0.3, not 1.0; resume it with the same settings"):
        train(records(), small_settings(epsilon=3.0, clip=1.0), tmp_path / "run", resume=True)
    with pytest.raises(UserError, match="was started on other records"):
        train(records(count=50), settings, tmp_path / "run", resume=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="the run's folder cannot be made"):
        train(records(), settings, tmp_path / "file" / "run")
    checkpoint = RunFolder(tmp_path / "run").checkpoint
    checkpoint.write_bytes(checkpoint.read_bytes()[:100])
    with pytest.raises(UserError, match="the checkpoint cannot be used"):
        train(records(), None, tmp_path / "run", resume=True)
    RunFolder(tmp_path / "run").configuration.write_text("{}")
    with pytest.raises(UserError, match="is damaged or of another version"):
        train(records(), None, tmp_path / "run", resume=True)


def test_a_finished_run_resumes_to_the_same_release(tmp_path) -> None:
    train(records(), small_settings(epsilon=3.0), tmp_path / "run")
    before = (tmp_path / "run" / "release" / "generator.safetensors").read_bytes()
    train(records(), None, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "release" / "generator.safetensors").read_bytes() == before
