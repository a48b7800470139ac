"""Generated batches, records and add/remove neighbours for tests of mechanisms."""

import torch
from torch import Tensor

from dp_sinkhorn.generators import GeneratorSpec, build_generator
from dp_sinkhorn.mechanisms import GeneratedBatch, mechanism_class
from dp_sinkhorn.mechanisms.sinkhorn import SinkhornMechanism
from dp_sinkhorn.records import RecordBatch
from dp_sinkhorn.transport import ElementwiseCost, SinkhornSolver

PRIVATE = ["row", "batch", "parameter"]
SHAPE, CLASSES = (1, 8, 8), 3
DIMENSION = 64


def make(
    name: str,
    *,
    rows: int = 6,
    debias: float = 0.5,
    clip: float = 0.05,
    l1_weight: float = 1.0,
    noise: float = 1.0,
    rate: float = 0.5,
    temperature: float = 0.5,
) -> SinkhornMechanism:
    return mechanism_class(name)(
        sampling_rate=rate,
        noise_multiplier=noise,
        rows=rows,
        debias=debias,
        clip=clip,
        cost=ElementwiseCost(l1_weight, class_scale=1.0),
        solver=SinkhornSolver(temperature),
    )


def generated(mechanism: SinkhornMechanism, seed: int) -> GeneratedBatch:
    """A batch from a small float64 generator, so that every mechanism has parameters to differentiate."""
    spec = GeneratorSpec("dcgan", SHAPE, CLASSES, 3, {"width": 2, "class_embedding": 2})
    generator = build_generator(spec, seed).double()
    stream = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (mechanism.batch_size,), generator=stream)
    latents = torch.rand(mechanism.batch_size, 3, generator=stream, dtype=torch.float64)
    return GeneratedBatch(generator(latents, labels).flatten(1), labels, tuple(generator.parameters()))


def answer(mechanism: SinkhornMechanism, batch: GeneratedBatch, pixels: Tensor, labels: Tensor) -> Tensor:
    """The un-noised query on these records."""
    return mechanism.query(batch, mechanism.self_term(batch), RecordBatch(pixels, labels))


def neighbours(kind: str, seed: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A pair of record batches that differ in one record."""
    stream = torch.Generator().manual_seed(seed)
    count = int(torch.randint(0, 8, (), generator=stream))
    pixels = torch.rand(count, DIMENSION, generator=stream, dtype=torch.float64) * 2 - 1
    labels = torch.randint(0, CLASSES, (count,), generator=stream)
    extra = torch.rand(1, DIMENSION, generator=stream, dtype=torch.float64) * 2 - 1
    extra_label = torch.randint(0, CLASSES, (1,), generator=stream)
    if kind == "outlier":
        extra = torch.sign(extra) * 10.0 ** torch.randint(0, 5, (), generator=stream)
    elif kind == "duplicate" and count:
        extra, extra_label = pixels[:1].clone(), labels[:1].clone()
    elif kind == "crowd":
        pixels[:] = extra
    elif kind == "flip":
        # The others pull one way, weakly; the extra record pulls the other way, from far off.
        direction = torch.sign(extra)
        pixels[:] = 3 * direction
        extra = -1e4 * direction
    together = (torch.cat([pixels, extra]), torch.cat([labels, extra_label]))
    return (pixels, labels), together
