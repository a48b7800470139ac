"""Per-record transport on MNIST and Fashion-MNIST: what it reaches at a given ε.

    python experiments/per_record.py --data-dir DATA [--datasets mnist fashion-mnist] [--epsilons 10 1 0.2] [--seeds 0]
        [--set name=value ...] [--split validation|test] [--out results/per-record.json] [--pictures FOLDER]

The dataset `fashion-unequal` is small and uneven: 3,600 T-shirts and 400 shirts, scored on as many of each, so that
its accuracies are balanced ones. Settings are those of the automatic plan, unless `--set` says otherwise. Each run
trains on the records, draws 20,000 images and scores them by the quick protocol. With `--split validation`, which is
for choosing settings, the last 10,000 training images are held out and scored against, and the test set is not touched;
with `--split test`, which is for reporting, all others are records. Rows are added to the results file one by one; a
row with the same dataset, ε, seed, split and settings is not computed again.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from common import commit, device_name
from dp_sinkhorn.devices import pick_device
from dp_sinkhorn.evaluation import evaluate_quick
from dp_sinkhorn.images import LabelledImages, from_arrays
from dp_sinkhorn.records import PrivateRecords, load_source
from dp_sinkhorn.release import Release
from dp_sinkhorn.release.pictures import grid
from dp_sinkhorn.settings import complete, parse_settings, suited_scale
from dp_sinkhorn.training import train

SYNTHETIC = 20_000
HELD_OUT = 10_000
UNEQUAL = "fashion-unequal"
KEY = ("dataset", "target_epsilon", "seed", "split", "overrides")


def load(dataset: str, split: str, data_dir: Path | None) -> tuple[LabelledImages, LabelledImages]:
    """Records to train on, and real images to score against."""
    source = "fashion-mnist" if dataset == UNEQUAL else dataset
    data = load_source(source, data_dir=data_dir)
    if split == "test":
        records, reference = data, load_source(source, split="test", data_dir=data_dir)
    else:
        cut = len(data) - HELD_OUT
        records = LabelledImages(data.images[:cut], data.labels[:cut], data.classes)
        reference = LabelledImages(data.images[cut:], data.labels[cut:], data.classes)
    if dataset == UNEQUAL:
        return pair(records, 3_600, 400), pair(reference, 900, 900)
    return records, reference


def pair(data: LabelledImages, shirts_without: int, shirts_with: int) -> LabelledImages:
    """The first so many T-shirts (class 0) and shirts (class 6) of Fashion-MNIST, as two classes."""
    chosen = torch.cat(
        [(data.labels == k).nonzero()[:count, 0] for k, count in ((0, shirts_without), (6, shirts_with))]
    )
    return LabelledImages(data.images[chosen], (data.labels[chosen] > 0).long(), ("t-shirt", "shirt"))


def probe_accuracy(release: Release, reference: LabelledImages) -> float | None:
    """Of the probe that labels a release's images, on the real images themselves."""
    if release.labeller is None:
        return None
    parts = zip(torch.split(reference.images, 1000), torch.split(reference.labels, 1000), strict=True)
    device = release.labeller.weight.device
    right = sum(int((release.labeller.label(images.to(device)).cpu() == labels).sum()) for images, labels in parts)
    return round(100.0 * right / len(reference), 2)


def run(
    dataset: str, epsilon: float, seed: int, overrides: dict[str, str], split: str, device: torch.device,
    data: tuple[LabelledImages, LabelledImages], pictures: Path | None,
) -> dict[str, Any]:  # fmt: skip
    """Train once and score once."""
    records, reference = data
    settings = parse_settings(None, {**overrides, "epsilon": epsilon, "seed": seed})
    start = time.perf_counter()
    release = train(PrivateRecords(records, device), settings)
    seconds = time.perf_counter() - start
    images, labels = release.sample(SYNTHETIC, seed=seed)
    if pictures is not None:
        pictures.mkdir(parents=True, exist_ok=True)
        grid(images, labels, len(release.classes)).save(pictures / f"{dataset}-{epsilon:g}-seed{seed}.png")
    synthetic = from_arrays(images, labels, records.classes)
    scores = evaluate_quick(synthetic, reference, seed=seed, device=device)
    used = complete(settings, len(records), records.shape, suited_scale(device.type))
    return {
        "experiment": "per-record", "dataset": dataset, "method": "per-record transport", "mechanism": used.mechanism,
        "epsilon": release.privacy.epsilon, "target_epsilon": epsilon, "delta": release.privacy.delta,
        "accounting": "sound", "seed": seed, "split": split, "protocol": "quick", "synthetic": SYNTHETIC, "fid": None,
        "frechet_quick": round(scores.frechet, 2), "logreg": None, "mlp": round(scores.mlp, 2),
        "cnn": round(scores.cnn, 2), "probe": probe_accuracy(release, reference),
        "train_seconds": round(seconds, 1), "device": device_name(device),
        "noise_multiplier": release.privacy.noise_multiplier, "overrides": overrides,
        "settings": {name: getattr(used, name) for name in (
            "steps", "batch_size", "rows", "width", "latent", "temperature", "temperature_end", "debias",
            "debias_end", "learning_rate", "probe_share", "feature_scale",
        )},
        "commit": commit(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--datasets", nargs="+", default=["mnist", "fashion-mnist"])
    parser.add_argument("--epsilons", nargs="+", type=float, default=[10.0, 1.0, 0.2])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--split", choices=["validation", "test"], default="validation")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--pictures", type=Path, help="folder for grids of the first twelve images of each class")
    parser.add_argument("--out", type=Path, default=Path("results/per-record.json"))
    arguments = parser.parse_args()
    overrides = dict(assignment.split("=", 1) for assignment in arguments.set)
    rows = json.loads(arguments.out.read_text()) if arguments.out.exists() else []
    device = pick_device(arguments.device)
    command = f"python experiments/per_record.py --data-dir DATA --split {arguments.split}"
    for dataset in arguments.datasets:
        data = load(dataset, arguments.split, arguments.data_dir)
        for epsilon in arguments.epsilons:
            for seed in arguments.seeds:
                key = (dataset, epsilon, seed, arguments.split, overrides)
                if any(key == tuple(r[name] for name in KEY) for r in rows):
                    continue
                row = run(dataset, epsilon, seed, overrides, arguments.split, device, data, arguments.pictures)
                rows.append({**row, "command": " ".join([command, *(f"--set {part}" for part in arguments.set)])})
                arguments.out.parent.mkdir(parents=True, exist_ok=True)
                arguments.out.write_text(json.dumps(rows, indent=1) + "\n")
                shown = ("dataset", "target_epsilon", "seed", "overrides", "cnn", "mlp", "frechet_quick")
                print({name: row[name] for name in (*shown, "probe", "train_seconds")}, flush=True)


if __name__ == "__main__":
    main()
