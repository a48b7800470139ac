"""The paper's loop, watched: quick evaluation at a few points of a short run on a CPU.

    python experiments/paper_loop.py --data-dir DATA [--out results/paper-loop.json]

Trains on the first 10,000 MNIST records for 2,000 steps: at the published settings (preset `paper-mnist`) without noise
(`nonprivate`, same batch; generator passes in float32 and in bfloat16) and with mechanism `row` and its published
noise; and with `row` at this package's own settings and the noise that a sound ε = 10 takes. The generator is scored
before training and after 500, 1,000 and 2,000 steps on the MNIST test set. Each score is a row of the results file.
The ε in a row is the sound one, of the steps up to there.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from pathlib import Path
from typing import Any

import torch

from common import commit
from dp_sinkhorn.accounting import Budget, Ledger
from dp_sinkhorn.devices import pick_device
from dp_sinkhorn.evaluation import evaluate_quick
from dp_sinkhorn.generators import Generator, GeneratorSpec, build_generator
from dp_sinkhorn.images import LabelledImages, from_pixels
from dp_sinkhorn.mechanisms import Barrier, OsEntropy
from dp_sinkhorn.records import PrivateRecords, load_source
from dp_sinkhorn.settings import complete, default_delta, parse_settings, plan
from dp_sinkhorn.training import Trainer

RECORDS = 10_000
MILESTONES = (0, 500, 1_000, 2_000)
SYNTHETIC = 10_000
RUNS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "published settings, no noise, float32": (
        "paper-mnist", {"mechanism": "nonprivate", "noise_multiplier": None, "precision": "float32"}),
    "published settings, no noise, bfloat16": (
        "paper-mnist", {"mechanism": "nonprivate", "noise_multiplier": None, "precision": "bfloat16"}),
    "published settings and noise": ("paper-mnist", {}),
    "our settings, sound epsilon 10": (None, {"mechanism": "row", "epsilon": 10, "steps": MILESTONES[-1]}),
}  # fmt: skip


def draw(generator: Generator, classes: tuple[str, ...]) -> LabelledImages:
    """Synthetic images, as a release would draw them."""
    trained = copy.deepcopy(generator).eval()
    labels = torch.arange(SYNTHETIC) % len(classes)
    public = torch.Generator().manual_seed(0)
    device = next(trained.parameters()).device
    with torch.inference_mode():
        images = [from_pixels(trained.draw(part.to(device), public)).cpu() for part in torch.split(labels, 1000)]
    return LabelledImages(torch.cat(images), labels, classes)


def run(name: str, device: torch.device, data: LabelledImages, test: LabelledImages) -> list[dict[str, Any]]:
    """Train once, scoring at the milestones."""
    settings = complete(parse_settings(*RUNS[name]), len(data), data.shape)
    revision = commit()
    if settings.epsilon is not None:
        settings = settings.model_copy(update={"noise_multiplier": plan(settings, len(data)).noise_multiplier})
    mechanism = settings.make_mechanism(len(data))
    ledger = Ledger(Budget(settings.epsilon, settings.delta or default_delta(len(data))))
    sizes = {"width": settings.width, "class_embedding": settings.class_embedding}
    spec = GeneratorSpec(settings.generator, data.shape, len(data.classes), settings.latent, sizes)
    generator = build_generator(spec, settings.seed).to(device)
    barrier = Barrier(mechanism, PrivateRecords(data, device), OsEntropy(), ledger)
    trainer = Trainer(generator, barrier, settings, MILESTONES[-1])
    rows: list[dict[str, Any]] = []
    clock = {"training": 0.0, "since": time.perf_counter()}

    def score(step: int) -> None:
        if step not in MILESTONES:
            return
        clock["training"] += time.perf_counter() - clock["since"]
        scores = evaluate_quick(draw(trainer.averaged.generator, data.classes), test, device=device)
        private = settings.is_private()
        rows.append(
            {
                "experiment": "paper-loop", "run": name, "dataset": "mnist, first 10,000", "method": "DP-Sinkhorn",
                "mechanism": settings.mechanism, "precision": settings.precision,
                "epsilon": round(ledger.epsilon(), 2) if private and step else None,
                "delta": ledger.budget.delta if private else None,
                "accounting": "sound", "seed": settings.seed, "step": step,
                "noise_multiplier": mechanism.noise_multiplier if private else 0.0, "protocol": "quick", "fid": None,
                "frechet_quick": round(scores.frechet, 2), "logreg": None, "mlp": round(scores.mlp, 2),
                "cnn": round(scores.cnn, 2), "train_seconds": round(clock["training"], 1), "device": str(device),
                "commit": revision, "command": "python experiments/paper_loop.py --data-dir DATA",
            }
        )  # fmt: skip
        shown = ("run", "step", "epsilon", "mlp", "cnn", "frechet_quick")
        print({key: rows[-1][key] for key in shown}, flush=True)
        clock["since"] = time.perf_counter()

    score(0)
    trainer.run(on_step=score)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("results/paper-loop.json"))
    arguments = parser.parse_args()
    device = pick_device(arguments.device)
    records = load_source("mnist", data_dir=arguments.data_dir)
    data = LabelledImages(records.images[:RECORDS], records.labels[:RECORDS], records.classes)
    test = load_source("mnist", split="test", data_dir=arguments.data_dir)
    rows: list[dict[str, Any]] = []
    for name in RUNS:
        rows += run(name, device, data, test)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
