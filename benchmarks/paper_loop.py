"""Speed of Algorithm 1 at the published MNIST settings, beside the same loop written with GeomLoss.

    python benchmarks/paper_loop.py [--steps 30] [--device auto] [--out FILE]

n = 50 rows, n' = 20 fresh samples, about 50 records a step, cost L2² + L1, λ = 0.05, the DCGAN of the
appendix. Images are random: speed does not depend on what they show. The loops take turns in one process, so that a
busy machine slows all of them:

    ours               this package, mechanism `row`, settings as they come: the generator's passes run in bfloat16
                       where the processor multiplies it natively, the loss in float32
    ours, float32      the same with `precision=float32`
    geomloss           a plain PyTorch loop: GeomLoss's SamplesLoss, dense cost, backward hook, torch's noise,
                       and the DCGAN as four ConvTranspose2d layers in the default memory layout
    geomloss, our net  the same loop around this package's generator, which tells the two gains apart
    geomloss, bfloat16 the plain loop with its generator under autocast

Before timing, the loss's gradient of the loops is compared on the same batch.
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
from geomloss import SamplesLoss
from torch import Tensor, nn

from dp_sinkhorn.accounting import Budget, Ledger
from dp_sinkhorn.devices import pick_device, suited_precision
from dp_sinkhorn.generators import GeneratorSpec, build_generator
from dp_sinkhorn.images import LabelledImages, to_pixels
from dp_sinkhorn.mechanisms import Barrier, OsEntropy
from dp_sinkhorn.records import PrivateRecords
from dp_sinkhorn.settings import parse_settings
from dp_sinkhorn.training import Trainer
from dp_sinkhorn.transport import ElementwiseCost, PointCloud, SinkhornSolver, semi_debiased_sinkhorn_loss

RECORDS, ROWS, FRESH, CLASSES, SCALE = 60_000, 50, 20, 10, 15.0
SPEC = GeneratorSpec("dcgan", (1, 28, 28), CLASSES, 12, {"width": 64, "class_embedding": 4})


class PlainDCGAN(nn.Module):
    """The appendix's generator as one would first write it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, 4)
        self.layers = nn.Sequential(
            nn.ConvTranspose2d(16, 256, 7, 1, 0, bias=False), nn.BatchNorm2d(256), nn.ReLU(),
            nn.ConvTranspose2d(256, 128, 4, 2, 1, bias=False), nn.BatchNorm2d(128), nn.ReLU(),
            nn.ConvTranspose2d(128, 64, 4, 2, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
            nn.ConvTranspose2d(64, 1, 3, 1, 1), nn.Tanh(),
        )  # fmt: skip

    def forward(self, latents: Tensor, labels: Tensor) -> Tensor:
        """Images for latents and labels."""
        images: Tensor = self.layers(torch.cat([latents, self.embedding(labels)], 1)[:, :, None, None])
        return images


def dense_cost(x: Tensor, y: Tensor) -> Tensor:
    """L2² + L1 by the definition."""
    difference = x.unsqueeze(-2) - y.unsqueeze(-3)
    return difference.square().sum(-1) + difference.abs().sum(-1)


def geomloss_loss(points: Tensor, labels: Tensor, real: Tensor, real_labels: Tensor, peer: SamplesLoss) -> Tensor:
    """The semi-debiased loss (Definition 3.3) of embedded points."""
    embed = lambda x, l: torch.cat([x, SCALE * nn.functional.one_hot(l, CLASSES).to(x)], 1)  # noqa: E731, E741
    x, y = embed(points, labels), embed(real, real_labels)
    loss: Tensor = 2 * peer(x[:ROWS], y) - peer(x[:ROWS], x[FRESH : ROWS + FRESH])
    return loss


def geomloss_step(
    generator: nn.Module, data: LabelledImages, device: torch.device, *, autocast: bool = False
) -> Callable[[int], None]:
    """One iteration of the plain loop; `autocast` runs its generator in bfloat16."""
    generator.to(device).train()
    optimizer = torch.optim.Adam(generator.parameters(), 1e-4, weight_decay=2e-5)
    peer = SamplesLoss(p=1, blur=0.05, debias=False, cost=dense_cost, backend="tensorized")
    images, classes = to_pixels(data.images).flatten(1).to(device), data.labels.to(device)
    clip, noise = 0.5, 1.5

    def sanitise(gradient: Tensor) -> Tensor:
        clipped = gradient * (clip / gradient.norm(dim=1, keepdim=True)).clamp_max(1.0)
        clipped[:ROWS] += 2 * clip * noise * torch.randn_like(clipped[:ROWS])
        return clipped

    def step(_: int) -> None:
        drawn = torch.rand(len(images), device=device) < ROWS / RECORDS
        labels = torch.randint(0, CLASSES, (ROWS + FRESH,), device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            points = generator(torch.rand(ROWS + FRESH, 12, device=device), labels).flatten(1).float()
        points.register_hook(sanitise)
        optimizer.zero_grad()
        geomloss_loss(points, labels, images[drawn], classes[drawn], peer).backward()
        optimizer.step()

    return step


def our_step(data: LabelledImages, device: torch.device, precision: str) -> Callable[[int], None]:
    """One iteration of this package's loop."""
    settings = parse_settings("paper-mnist", {"precision": precision})
    records = PrivateRecords(data, device)
    barrier = Barrier(settings.make_mechanism(RECORDS), records, OsEntropy(), Ledger(Budget(None, 1e-5)))
    trainer = Trainer(build_generator(SPEC, 0).to(device).train(), barrier, settings, 160_000)
    barrier.reserve(100_000)
    return trainer._step


def gradient_difference(device: torch.device) -> float:
    """Largest relative difference of the two losses' gradients on one batch, in float64."""
    stream = torch.Generator().manual_seed(0)
    points = (torch.rand(ROWS + FRESH, 784, generator=stream, dtype=torch.float64) * 2 - 1).to(device).requires_grad_()
    real = (torch.rand(ROWS, 784, generator=stream, dtype=torch.float64) * 2 - 1).to(device)
    labels = torch.randint(0, CLASSES, (ROWS + FRESH,), generator=stream).to(device)
    diameter = 56.0
    peer = SamplesLoss(p=1, blur=0.05, diameter=diameter, debias=False, cost=dense_cost, backend="tensorized")
    theirs = torch.autograd.grad(geomloss_loss(points, labels, real, labels[:ROWS], peer), points)[0]
    loss = semi_debiased_sinkhorn_loss(
        PointCloud(points, labels),
        PointCloud(real, labels[:ROWS]),
        FRESH / ROWS,
        ElementwiseCost(1.0, class_scale=SCALE),
        SinkhornSolver(0.05, exponent=1, diameter=diameter),
    )
    ours = torch.autograd.grad(loss, points)[0]
    return float((ours - theirs).norm() / theirs.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="timed steps of each loop")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = pick_device(arguments.device)
    images = torch.randint(0, 256, (RECORDS, 1, 28, 28), dtype=torch.uint8)
    data = LabelledImages(images, torch.arange(RECORDS) % CLASSES, tuple("0123456789"))
    loops = {
        "ours": our_step(data, device, "auto"),
        "ours, float32": our_step(data, device, "float32"),
        "geomloss": geomloss_step(PlainDCGAN(), data, device),
        "geomloss, our net": geomloss_step(build_generator(SPEC, 0), data, device),
        "geomloss, bfloat16": geomloss_step(PlainDCGAN(), data, device, autocast=True),
    }
    times: dict[str, list[float]] = {name: [] for name in loops}
    for step in range(arguments.steps + 3):
        for name, loop in loops.items():
            start = time.perf_counter()
            loop(step)
            if device.type == "cuda":
                torch.cuda.synchronize()
            if step >= 3:  # the first ones warm up
                times[name].append(time.perf_counter() - start)
    rates = {name: 1.0 / statistics.median(seconds) for name, seconds in times.items()}
    result = {
        "benchmark": "paper-loop",
        "device": torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "steps": arguments.steps,
        "iterations_per_second": {name: round(rate, 2) for name, rate in rates.items()},
        "ratio_to_geomloss": {
            name: round(rates[name] / rates["geomloss"], 2) for name in rates if name.startswith("ours")
        },
        "ratio_to_geomloss_in_bfloat16": round(rates["ours"] / rates["geomloss, bfloat16"], 2),
        "float32_ratio_with_the_same_generator": round(rates["ours, float32"] / rates["geomloss, our net"], 2),
        "precision_of_ours": suited_precision(device, (ROWS + FRESH) * 784),
        "gradient_difference": gradient_difference(device),
        "command": "python benchmarks/paper_loop.py",
    }
    print(json.dumps(result, indent=2))
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
