"""The command line as a user types it: output, files, exit status, and the one line of every error."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dp_sinkhorn.cli import main
from tests.toy import SMALL, stripes

SETTINGS = [argument for key, value in SMALL.items() for argument in ("--set", f"{key}={value}")]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("source") / "stripes.npz"
    data = stripes()
    np.savez(path, images=data.images.squeeze(1).numpy(), labels=data.labels.numpy(), classes=np.array(data.classes))
    return path


@pytest.fixture(scope="module")
def run(source, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    assert main(["train", str(source), "--out", str(out), "--epsilon", "3", *SETTINGS]) == 0
    return out


def fails(capsys, *arguments: object) -> str:
    """Run a command that must fail; returns its one line."""
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 2
    output = capsys.readouterr()
    lines = output.err.strip().splitlines()
    assert len(lines) == 1, output.err
    assert lines[0].startswith("dp-sinkhorn: ")
    return lines[0]


def test_train_writes_a_release_and_says_where(run, source, tmp_path, capsys) -> None:
    out = tmp_path / "again"
    assert main(["train", str(source), "--out", str(out), "--epsilon", "3", *SETTINGS]) == 0
    output = capsys.readouterr().out
    assert "differential privacy" in output
    assert str(out / "release" / "samples.png") in output
    assert (run / "release" / "release.json").exists()


def test_sample_to_npz_and_to_a_folder(run, tmp_path) -> None:
    file = tmp_path / "deep" / "samples.npz"
    assert main(["sample", str(run / "release"), "--out", str(file), "--count", "10", "--seed", "1"]) == 0
    with np.load(file) as arrays:
        assert arrays["images"].shape == (10, 8, 8)
        assert arrays["images"].dtype == np.uint8
        assert arrays["labels"].dtype == np.int64
        assert arrays["classes"].tolist() == ["top", "left"]
    folder, grid = tmp_path / "png", tmp_path / "grid.png"
    arguments = ["--per-class", "3", "--labels", "1", "--grid", str(grid)]
    assert main(["sample", str(run / "release"), "--out", str(folder), *arguments]) == 0
    assert len(list(folder.rglob("*.png"))) == 3
    assert Image.open(grid).size == (12 * 50, 50)
    again = tmp_path / "again.npz"
    assert main(["sample", str(run / "release"), "--out", str(again), "--count", "10", "--seed", "1"]) == 0
    assert (np.load(again)["images"] == np.load(file)["images"]).all()


def test_evaluate_prints_and_writes_scores(run, source, tmp_path, capsys) -> None:
    scores = tmp_path / "scores.json"
    arguments = ["--against", str(source), "--protocol", "quick", "--count", "200", "--json", str(scores)]
    assert main(["evaluate", str(run / "release"), *arguments]) == 0
    output = capsys.readouterr().out
    assert "CNN accuracy" in output
    assert "private" in output
    content = json.loads(scores.read_text())
    assert 0 <= content["cnn"] <= 100
    assert content["privacy"]["epsilon"] <= 3


def test_plan_prints_json_and_text(capsys) -> None:
    arguments = [
        "plan",
        "--records",
        "60000",
        "--batch",
        "50",
        "--steps",
        "160000",
        "--noise",
        "1.5",
        "--mechanism",
        "row",
    ]
    assert main([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["epsilon"] == pytest.approx(846, rel=0.01)
    assert result["as_published_epsilon"] == pytest.approx(9.21, rel=0.005)
    assert result["delta"] == 1e-5
    assert result["noise_multiplier"] == 1.5
    assert result["steps"] == 160_000
    assert result["sampling_rate"] == pytest.approx(1 / 1200)
    assert (result["mechanism"], result["accountant"]) == ("row", "pld")
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "845" in text
    assert "promises next to nothing" in text
    assert "NOT a guarantee" in text


def test_an_interrupted_run_can_be_resumed_from_the_command_line(source, tmp_path) -> None:
    out = tmp_path / "run"
    settings = [part for part in SETTINGS if not part.startswith("steps=")]
    settings = settings[: settings.index("--set", len(settings) - 1)] if settings[-1] == "--set" else settings
    command = [sys.executable, "-m", "dp_sinkhorn", "train", str(source), "--out", str(out)]
    process = subprocess.Popen(
        [*command, "--set", "noise_multiplier=50", "--set", "steps=100000", *settings],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    checkpoint = out / "private" / "checkpoint.safetensors"
    deadline = time.monotonic() + 120
    while not checkpoint.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "nothing is lost" in output
    assert "--resume" in output
    assert not (out / "release").exists()
    before = sum(1 for _ in (out / "private" / "ledger.jsonl").open())
    process = subprocess.Popen([*command, "--resume"], env={**os.environ, "OMP_NUM_THREADS": "1"})
    while sum(1 for _ in (out / "private" / "ledger.jsonl").open()) == before and time.monotonic() < deadline + 120:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 130


def test_errors_are_one_line_and_status_2(run, source, tmp_path, capsys) -> None:
    missing = tmp_path / "missing"
    out = tmp_path / "out"
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").write_text("")
    cases = [
        (["train", missing, "--out", out], "no such folder or file, nor a known source"),
        (["train", source], "Missing option '--out'"),
        (["train", source, "--out", out, "--epsilon", "ten"], "--epsilon"),
        (["train", source, "--out", out, "--preset", "none"], "unknown preset 'none'"),
        (["train", source, "--out", out, "--set", "steps"], "--set steps: expected KEY=VALUE"),
        (["train", source, "--out", out, "--set", "stesp=3"], "unknown setting 'stesp'"),
        (["train", source, "--out", out, "--set", "epsilon=3", "--epsilon", "3"], "epsilon is given twice"),
        (["train", source, "--out", out, "--device", "tpu"], "device 'tpu' cannot be used"),
        (["train", source, "--out", run, "--set", "batch_size=10"], "holds a run already; add --resume"),
        (["train", source, "--out", out, "--resume"], "no run to resume here"),
        (["train", "mnist", "--out", out, "--data-dir", tmp_path], "--data-dir"),
        (["sample", missing, "--out", out], "not a release"),
        (["sample", run, "--out", full], "is not an empty folder"),
        (["sample", run, "--out", out, "--labels", "a"], "--labels a: expected class numbers"),
        (["sample", run, "--out", out, "--labels", "9"], "class 9 is out of range"),
        (["sample", run, "--out", out, "--count", "1", "--per-class", "1"], "exclude each other"),
        (["sample", run, "--out", out, "--count", "0"], "draw at least one image"),
        (["sample", run, "--out", full / "file" / "x.npz"], "file"),
        (["sample", run, "--out", out, "--count", "999999999999999"], "draw at most 10000000 at a time"),
        (["sample", run, "--out", out, "--seed", "99999999999999999999999"], "seed 99999999999999999999999: must be 0"),
        (["sample", run, "--out", out, "--seed", "-1"], "seed -1: must be 0"),
        (["evaluate", run, "--against", source, "--json", missing / "x.json"], "no such folder for --json"),
        (["train", "celeba", "--out", out], "celeba: this version does not read the published archive"),
        (["evaluate", run, "--against", "digits"], "1 class|2 classes|classes but the reference"),
        (["evaluate", run, "--against", source, "--protocol", "slow"], "unknown protocol 'slow'"),
        (["plan"], "Missing option '--records'"),
        (["plan", "--records", "60000", "--mechanism", "rows"], "unknown mechanism 'rows'"),
        (["plan", "--records", "1"], "at least two records"),
        (["paint"], "No such command 'paint'"),
    ]
    for arguments, message in cases:
        line = fails(capsys, *arguments)
        assert any(part in line for part in message.split("|")), (arguments, line)
        assert not out.exists(), f"{arguments} left something behind"


def test_a_bare_call_shows_the_help_and_nothing_else(capsys) -> None:
    assert main([]) == 2
    output = capsys.readouterr()
    assert "train" in output.out + output.err
    assert "dp-sinkhorn: " not in output.err


def test_version_and_help(capsys) -> None:
    assert main(["--version"]) == 0
    assert "dp-sinkhorn 0.1.0" in capsys.readouterr().out
    assert main(["--help"]) == 0
    for command in ("train", "sample", "evaluate", "plan"):
        assert command in capsys.readouterr().out or main([command, "--help"]) == 0


def test_sample_starts_fast(run, tmp_path) -> None:
    """Beyond torch's own import, `sample` is done within two seconds."""
    script = f"""
import time, torch
start = time.perf_counter()
from dp_sinkhorn.cli import main
assert main(["sample", {str(run)!r}, "--out", {str(tmp_path / "x.npz")!r}, "--count", "10"]) == 0
print(time.perf_counter() - start)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert float(done.stdout.splitlines()[-1]) < 2.0
