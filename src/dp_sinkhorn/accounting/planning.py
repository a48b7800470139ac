"""Solve for σ or T: the least noise, or the most steps, within a budget."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import dp_accounting
from dp_accounting import mechanism_calibration as calibration
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from dp_sinkhorn.accounting.epsilon import Accountant, compose, epsilon_of, pld_grid
from dp_sinkhorn.errors import UserError
from dp_sinkhorn.mechanisms.base import Mechanism

MAX_NOISE = 1e6
MAX_STEPS = 10_000_000


def solve_noise(
    mechanism: Mechanism, steps: int, epsilon: float, delta: float, accountant: Accountant = "pld"
) -> float:
    """The least noise multiplier σ, to four digits and rounded up, for `steps` releases within (ε, δ)."""

    def event(noise: float) -> dp_accounting.DpEvent:
        return compose([(dataclasses.replace(mechanism, noise_multiplier=noise).event, steps)])

    # A search in log σ, where ε falls about evenly.
    exponent = _calibrate(lambda x: event(10.0**x), epsilon, delta, accountant, low=-3.0, high=6.0, tolerance=1e-4)
    if exponent is None:
        raise UserError(
            f"no noise multiplier up to {MAX_NOISE:g} reaches epsilon={epsilon:g} at delta={delta:g} "
            f"with {steps} steps; ask for fewer steps or a larger epsilon"
        )
    noise = _round_up(10.0**exponent)
    while epsilon_of(event(noise), delta, accountant) > epsilon:
        noise = _round_up(noise * 1.0005)
    return noise


def solve_steps(mechanism: Mechanism, epsilon: float, delta: float, accountant: Accountant = "pld") -> int:
    """The largest number of releases within (ε, δ)."""

    def spent(steps: int) -> float:
        return epsilon_of(compose([(mechanism.event, steps)]), delta, accountant)

    if spent(1) > epsilon:
        raise UserError(
            f"a single step costs epsilon={spent(1):.4g} at delta={delta:g}, more than the {epsilon:g} allowed; "
            "raise the noise multiplier or lower the batch size"
        )
    exponent = _calibrate(
        lambda x: compose([(mechanism.event, max(1, round(10.0**x)))]),
        epsilon, delta, accountant, low=0.0, high=math.log10(MAX_STEPS), tolerance=1e-5,
    )  # fmt: skip
    if exponent is None:
        return MAX_STEPS
    # The accountant is not exactly monotone in its last digits: settle on a number whose own cost was computed.
    steps: int = max(1, math.floor(10.0**exponent))
    while spent(steps) > epsilon:
        steps = min(steps - 1, math.floor(steps * 0.9999))
    while steps < 1000 and spent(steps + 1) <= epsilon:
        steps += 1
    return steps


def _calibrate(
    event: Callable[[float], dp_accounting.DpEvent],
    epsilon: float,
    delta: float,
    accountant: Accountant,
    *,
    low: float,
    high: float,
    tolerance: float,
) -> float | None:
    """Where ε meets the target between two exponents: first by Rényi DP, then by PLD close to that.

    Returns None when no point of the interval meets it.
    """

    def search(make: Callable[[], dp_accounting.PrivacyAccountant], start: float, stop: float) -> float | None:
        try:
            return float(
                calibration.calibrate_dp_mechanism(
                    make,
                    event,
                    epsilon,
                    delta,
                    calibration.ExplicitBracketInterval(start, stop),
                    tol=tolerance,
                )
            )
        except ValueError:  # the ends do not enclose a solution
            return None

    renyi = search(RdpAccountant, low, high)
    if renyi is None or accountant == "rdp":
        return renyi
    grid = pld_grid(1.1 * epsilon)
    if grid is None:
        return renyi
    # The PLD solution lies a few per cent on the cheaper side of the Rényi one. A ten times coarser grid, which costs a
    # tenth, finds it nearly; the fine grid then has little left to search. The wider intervals are for extremes.
    nearby = search(_pld_accountant(10.0 * grid), renyi - 0.06, renyi + 0.01)
    start, widths = (renyi, (0.06, 0.3, 1.0)) if nearby is None else (nearby, (0.004, 0.03, 0.3))
    for width in widths:
        exact = search(_pld_accountant(grid), start - width, start + width)
        if exact is not None:
            return exact
    return renyi


def _pld_accountant(grid: float) -> Callable[[], dp_accounting.PrivacyAccountant]:
    return lambda: PLDAccountant(value_discretization_interval=grid)


def _round_up(value: float) -> float:
    """Up to four significant digits."""
    text = f"{value:.3e}"
    rounded = float(text)
    if rounded < value:
        mantissa, exponent = text.split("e")
        rounded = float(f"{float(mantissa) + 0.001:.3f}e{exponent}")
    return rounded
