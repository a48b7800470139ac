"""The part of per-record transport that trains the probe: clipped gradients of its loss, summed exactly."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from dp_sinkhorn.features import FEATURE_GRID
from dp_sinkhorn.labelling import BIAS
from dp_sinkhorn.transport.pull import MARGIN

_RESIDUAL_GRID = 2.0**18
_WEIGHT_GRID = 2.0**12
_CHUNK = 1000


def probe_gradient(weight: Tensor, centre: Tensor, features: Tensor, labels: Tensor, bound: float) -> Tensor:
    """Σ_y ḡ(y), the clipped gradients of the probe's cross-entropy, (k + 1, L) in float64.

    A record's gradient is [φ(y) − centre, BIAS] ⊗ (p − e_l). It is scaled to norm c, `bound`, at most, and its residual
    rounded towards zero to multiples of 2^-18. Features are multiples of 2^-14, and the centre is rounded to one, so
    the sum of the products is exact. So are the logits, with weights on a grid: a record's part does not depend, not
    even in its last bit, on the records beside it.
    """
    weight = torch.nan_to_num(weight.double(), nan=0.0).mul(_WEIGHT_GRID).round_().div_(_WEIGHT_GRID)
    weight = weight.clamp_(-_WEIGHT_GRID, _WEIGHT_GRID)
    centre = torch.nan_to_num(centre.double(), nan=0.0).div_(FEATURE_GRID).round_().mul_(FEATURE_GRID).clamp_(-1.0, 1.0)
    total = torch.zeros_like(weight)
    for start in range(0, len(labels), _CHUNK):
        # Chunks of one shape, filled up with zeros.
        present = len(labels[start : start + _CHUNK])
        values = F.pad(features[start : start + present].double() * FEATURE_GRID, (0, 0, 0, _CHUNK - present))
        values -= centre
        answers = F.one_hot(F.pad(labels[start : start + present], (0, _CHUNK - present)), weight.shape[1])
        residuals = torch.softmax(values @ weight[:-1] + BIAS * weight[-1], dim=1) - answers
        residuals[present:] = 0.0
        norms = residuals.norm(dim=1, keepdim=True) * (values.square().sum(1, keepdim=True) + BIAS**2).sqrt()
        limit = bound * (1.0 - MARGIN)
        residuals = torch.trunc(residuals * (limit / norms.clamp_min(limit)) * _RESIDUAL_GRID) / _RESIDUAL_GRID
        total[:-1] += values.T @ residuals
        total[-1] += BIAS * residuals.sum(0)
    return total
