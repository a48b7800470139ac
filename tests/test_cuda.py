"""The same on a GPU; skipped where there is none."""

import pytest
import torch

from dp_sinkhorn.records import PrivateRecords
from dp_sinkhorn.training import Interrupted, train
from dp_sinkhorn.transport import ElementwiseCost, PointCloud, SinkhornSolver, transport
from dp_sinkhorn.transport.pull import ATOM_GRID, clipped_pull, to_levels
from tests.toy import small_settings, stripes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("l1_weight", [0.0, 1.0])
def test_transport_agrees_with_the_cpu(dtype: torch.dtype, l1_weight: float) -> None:
    stream = torch.Generator().manual_seed(0)
    x, y = (torch.rand(3, rows, 784, generator=stream, dtype=torch.float64) * 2 - 1 for rows in (50, 40))
    labels = torch.randint(0, 10, (3, 50), generator=stream)
    mask = torch.rand(3, 40, generator=stream) < 0.8
    cost = ElementwiseCost(l1_weight, class_scale=15, memory_budget=1 << 20)
    solver = SinkhornSolver(5.0, diameter=56.0)

    def solve(device: str, dtype: torch.dtype):
        clouds = (
            PointCloud(x.to(device, dtype), labels.to(device)),
            PointCloud(y.to(device, dtype), None, mask.to(device)),
        )
        return transport(*clouds, cost, solver)

    exact, ours = solve("cpu", torch.float64), solve("cuda", dtype)
    bound = 1e-4 if dtype == torch.float32 else 1e-12
    for name in ("value", "gradient_x", "gradient_y"):
        reference, value = getattr(exact, name), getattr(ours, name).cpu().double()
        assert (value - reference).norm() <= bound * reference.norm(), name


@pytest.mark.parametrize("mechanism", ["per_record", "row", "batch", "parameter", "nonprivate"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_training_on_a_gpu(tmp_path, mechanism: str, precision: str) -> None:
    noise = None if mechanism == "nonprivate" else 30
    settings = small_settings(mechanism=mechanism, noise_multiplier=noise, precision=precision, averaging=0.9)
    records = PrivateRecords(stripes(), "cuda")
    with pytest.raises(Interrupted):
        train(records, settings, tmp_path / "run", should_stop=iter([False, False, True]).__next__)
    release = train(records, None, tmp_path / "run", resume=True)
    assert release.privacy.steps == 20
    assert release.sample(10)[0].shape == (10, 8, 8)


@pytest.mark.parametrize("l1_weight", [0.0, 1.0])
def test_a_records_pull_keeps_its_bound_and_does_not_depend_on_other_records(l1_weight: float) -> None:
    """By brute force in float64, as tests/mechanisms/test_per_record.py does on a CPU."""
    cost, bound = ElementwiseCost(l1_weight), 1.0
    stream = torch.Generator().manual_seed(0)
    atoms = to_levels(torch.rand(1, 40, 784, generator=stream) * 2 - 1, ATOM_GRID).cuda()
    records = to_levels(torch.rand(1, 300, 784, generator=stream) * 2 - 1).cuda()
    everyone = torch.ones(1, 300, dtype=torch.bool, device="cuda")
    together = clipped_pull(atoms, records, everyone, cost, 20.0, bound).differences
    summed = torch.zeros_like(together)
    first = torch.arange(300, device="cuda") == 0
    for k in range(300):
        # Each record alone, and in another place than among the others.
        part = clipped_pull(atoms, records.roll(-k, 1), first.unsqueeze(0), cost, 20.0, bound)
        assert part.gradient(cost).norm().item() <= bound
        summed += part.differences
    assert torch.equal(together, summed)
