"""Speed of a step of per-record transport, beside the same step written plainly in PyTorch.

    python benchmarks/per_record.py [--steps 20] [--device auto] [--scale small|large] [--out FILE]

60,000 random records of 28×28 pixels in ten classes, q = 0.1. `small` is the automatic plan of a CPU (n = 200 atoms,
m' = 400 own samples, DCGAN of width 16), `large` that of a GPU (n = 1000, m' = 2000, width 64). The loops take turns in
one process:

    ours           this package as it comes: exact sums in float64, noise from the operating system's generator, the
                   probe, features in the cost, generator passes in bfloat16 where the processor multiplies it natively
    ours, pixels   the same without probe and features, which the plain loop does not have either
    plain          padded class blocks, distances, norms and sums in float32 (TF32 on a GPU), torch's generator for
                   noise and sampling, generator passes in float32: short to write, but it proves no bound
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from dp_sinkhorn.accounting import Budget, Ledger
from dp_sinkhorn.devices import pick_device
from dp_sinkhorn.generators import Generator, GeneratorSpec, build_generator
from dp_sinkhorn.images import LabelledImages, to_pixels
from dp_sinkhorn.mechanisms import Barrier, OsEntropy
from dp_sinkhorn.records import PrivateRecords
from dp_sinkhorn.settings import Settings, complete, parse_settings
from dp_sinkhorn.training import Trainer

RECORDS, CLASSES, SHAPE = 60_000, 10, (1, 28, 28)
STEPS = 1_000_000


def make_generator(settings: Settings, device: torch.device) -> Generator:
    sizes = {"width": settings.given("width"), "class_embedding": settings.given("class_embedding")}
    return (
        build_generator(GeneratorSpec("dcgan", SHAPE, CLASSES, settings.given("latent"), sizes), 0).to(device).train()
    )


def our_step(data: LabelledImages, settings: Settings, device: torch.device) -> Callable[[int], None]:
    barrier = Barrier(
        settings.make_mechanism(RECORDS), PrivateRecords(data, device), OsEntropy(), Ledger(Budget(None, 1e-5))
    )
    trainer = Trainer(make_generator(settings, device), barrier, settings, STEPS)
    barrier.reserve(10_000)
    return trainer._step


def plain_step(data: LabelledImages, settings: Settings, device: torch.device) -> Callable[[int], None]:
    """One step as a researcher would write it."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
    generator = make_generator(settings, device)
    optimizer = torch.optim.Adam(generator.parameters(), settings.given("learning_rate"), betas=(0.9, 0.99))
    mechanism = settings.make_mechanism(RECORDS)
    rate, sigma, scale = mechanism.sampling_rate, mechanism.noise_multiplier, settings.given("temperature")
    order = torch.argsort(data.labels)
    records = to_pixels(data.images[order]).flatten(1).view(CLASSES, -1, 784).to(device)
    labels = mechanism.draw_labels(CLASSES, torch.Generator()).to(device)
    own_labels = mechanism.draw_own_labels(CLASSES).to(device)
    width = int(rate * records.shape[1] + 6 * (rate * records.shape[1]) ** 0.5)

    def pull(atoms: Tensor, points: Tensor, present: Tensor) -> Tensor:
        squares = atoms.square().sum(-1)[:, :, None] + points.square().sum(-1)[:, None] - 2 * atoms @ points.mT
        weights = torch.softmax(-squares / scale, 1)
        norms = (4 * weights.square() * squares.clamp_min(0)).sum(1, keepdim=True).sqrt()
        weights = weights * (1 / norms.clamp_min(1e-9)).clamp_max(1) * present[:, None]
        return 2 * (atoms * weights.sum(2, keepdim=True) - weights @ points)

    def step(_: int) -> None:
        keys = torch.rand(CLASSES, records.shape[1], device=device)
        drawn, index = (keys < rate).float().topk(width, dim=1)
        batch = records.gather(1, index[:, :, None].expand(-1, -1, 784)) * drawn[:, :, None]
        images = generator(torch.rand(len(labels), generator.latent, device=device), labels).flatten(1)
        with torch.no_grad():
            own = generator(torch.rand(len(own_labels), generator.latent, device=device), own_labels).flatten(1)
            atoms, own = images.detach().view(CLASSES, -1, 784), own.view(CLASSES, -1, 784)
            gradient = pull(atoms, batch, drawn)
            gradient = (gradient + sigma * torch.randn_like(gradient)) / (rate * RECORDS)
            gradient = gradient - 0.9 * pull(atoms, own, torch.ones_like(own[:, :, 0])) / len(own_labels)
        optimizer.zero_grad(set_to_none=True)
        images.backward(gradient.view_as(images))
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--scale", choices=["small", "large"])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = pick_device(arguments.device)
    scale = arguments.scale or ("large" if device.type == "cuda" else "small")
    stream = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (RECORDS, *SHAPE), dtype=torch.uint8, generator=stream)
    data = LabelledImages(images, torch.arange(RECORDS) % CLASSES, tuple(map(str, range(CLASSES))))

    def settings(**overrides: float) -> Settings:
        return complete(parse_settings(None, {"noise_multiplier": 2.0, **overrides}), RECORDS, SHAPE, scale)

    loops = {
        "ours": our_step(data, settings(), device),
        "ours, pixels": our_step(data, settings(probe_share=0.0, feature_scale=0.0), device),
        "plain": plain_step(data, settings(), device),
    }
    times: dict[str, list[float]] = {name: [] for name in loops}
    for step in range(arguments.steps + 3):
        for name, run in loops.items():
            start = time.perf_counter()
            run(step)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if step >= 3:  # the first steps compute features and warm caches
                times[name].append(time.perf_counter() - start)
    milliseconds = {name: round(1000 * statistics.median(values), 2) for name, values in times.items()}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    result = {
        "benchmark": "per-record", "device": name, "torch": torch.__version__, "python": platform.python_version(),
        "scale": scale, "steps": arguments.steps, "milliseconds_a_step": milliseconds,
        "ratio_to_plain": {k: round(milliseconds["plain"] / v, 2) for k, v in milliseconds.items() if k != "plain"},
        "command": f"python benchmarks/per_record.py --scale {scale}",
    }  # fmt: skip
    print(json.dumps(result, indent=2))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
