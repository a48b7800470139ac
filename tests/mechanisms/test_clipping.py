"""Clipped vectors are within the bound as they stand, not up to rounding."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dp_sinkhorn.mechanisms import clip_rows, clip_whole


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    log_scale=st.floats(-30, 38),
    bound=st.sampled_from([0.5, 1.0, 1e-3, 123.4, 1e-9]),
    dimension=st.integers(1, 5000),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_true_norm_never_exceeds_the_bound(seed, log_scale, bound, dimension, dtype) -> None:
    rows = (torch.randn(3, dimension, generator=torch.Generator().manual_seed(seed)).double() * 10**log_scale).to(dtype)
    clipped = clip_rows(rows, bound)
    assert (clipped.double().norm(dim=-1) <= bound).all()
    assert clip_whole(rows, bound).double().norm() <= bound
    short = rows.double().norm(dim=-1) < 0.999 * bound
    torch.testing.assert_close(clipped[short], rows[short], rtol=0, atol=0)


def test_other_formats_are_refused() -> None:
    with pytest.raises(TypeError, match=r"not for torch\.bfloat16"):
        clip_rows(torch.ones(2, 4, dtype=torch.bfloat16), 0.5)


def test_long_rows_keep_their_direction_and_reach_the_bound() -> None:
    rows = torch.tensor([[3.0, 4.0], [0.03, 0.04]])
    torch.testing.assert_close(clip_rows(rows, 0.5), torch.tensor([[0.3, 0.4], [0.03, 0.04]]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_a_poisoned_row_becomes_zero_and_spares_the_others(poison: float) -> None:
    rows = torch.ones(2, 4)
    rows[0, 1] = poison
    clipped = clip_rows(rows, 0.5)
    assert not clipped[0].any()
    assert torch.isfinite(clipped).all()
    assert clipped[1].any()
    assert not clip_whole(rows, 0.5).any()
