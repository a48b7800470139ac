"""Clipping that holds for the numbers that are actually summed.

`x · min(1, Δ/‖x‖)` computed naively in float32 may leave a vector slightly longer than Δ: the norm is rounded,
the quotient is rounded and so is each product. Here everything is computed in float64, to length Δ(1 − 2^-20);
after that, one float32 rounding of each coordinate (relative error 2^-24) cannot pass Δ
(docs/privacy.md, lemma "Clipping in floating point").
"""

from __future__ import annotations

import torch
from torch import Tensor

MARGIN = 2.0**-20


def clip_rows(rows: Tensor, bound: float) -> Tensor:
    """Scale each row of an (n, d) tensor to Euclidean norm at most `bound`.

    A row with a NaN or an infinity becomes zero: it must not pass the barrier, where no noise would hide it.
    """
    if rows.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"clipping is proven for float32 and float64, not for {rows.dtype}")
    exact = rows.double()
    # A row is divided by its largest coordinate first, so that no square overflows or vanishes.
    largest = exact.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    norms = largest * torch.linalg.vector_norm(exact / largest, dim=-1, keepdim=True)
    limit = bound * (1.0 - MARGIN)
    clipped = (exact * (limit / norms.clamp_min(limit))).to(rows.dtype)
    return torch.where(torch.isfinite(norms), clipped, torch.zeros_like(rows))


def clip_whole(value: Tensor, bound: float) -> Tensor:
    """Scale a tensor of any shape, taken as one vector, to Euclidean norm at most `bound`."""
    return clip_rows(value.reshape(1, -1), bound).reshape(value.shape)
