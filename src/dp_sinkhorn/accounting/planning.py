"""Solve for σ or T: the least noise, or the most steps, within a budget."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import dp_accounting
from dp_accounting import mechanism_calibration as calibration
from dp_accounting.rdp import RdpAccountant

from dp_sinkhorn.accounting.epsilon import Accountant, compose, epsilon_of
from dp_sinkhorn.errors import UserError
from dp_sinkhorn.mechanisms.base import Mechanism

MIN_NOISE, MAX_NOISE = 1e-3, 1e6
MAX_STEPS = 10_000_000

# A solution spends the target to within this fraction of it, where four digits of σ and whole steps allow.
_CLOSE = 1e-3
_EVALUATIONS = 20
_NEXT_TO_NOTHING = 1e-12


def solve_noise(
    mechanism: Mechanism, steps: int, epsilon: float, delta: float, accountant: Accountant = "pld"
) -> float:
    """The least noise multiplier σ, to four digits and rounded up, for `steps` releases within (ε, δ)."""

    def event(noise: float) -> dp_accounting.DpEvent:
        return compose([(dataclasses.replace(mechanism, noise_multiplier=noise).event, steps)])

    if epsilon_of(event(MAX_NOISE), delta, accountant) > epsilon:
        raise UserError(
            f"no noise multiplier up to {MAX_NOISE:g} reaches epsilon={epsilon:g} at delta={delta:g} "
            f"with {steps} steps; ask for fewer steps or a larger epsilon"
        )
    return _solve(event, epsilon, delta, accountant, (MIN_NOISE, MAX_NOISE), rises=False, safe=_round_up)


def solve_steps(mechanism: Mechanism, epsilon: float, delta: float, accountant: Accountant = "pld") -> int:
    """The largest number of releases within (ε, δ), to a thousandth; exactly below a thousand."""

    def event(steps: float) -> dp_accounting.DpEvent:
        return compose([(mechanism.event, int(steps))])

    def spent(steps: float) -> float:
        return epsilon_of(event(steps), delta, accountant)

    if spent(1) > epsilon:
        raise UserError(
            f"a single step costs epsilon={spent(1):.4g} at delta={delta:g}, more than the {epsilon:g} allowed; "
            "raise the noise multiplier or lower the batch size"
        )
    steps = int(_solve(event, epsilon, delta, accountant, (1, MAX_STEPS), rises=True, safe=math.floor))
    while steps < 1000 and spent(steps + 1) <= epsilon:
        steps += 1
    return steps


def _solve(
    event: Callable[[float], dp_accounting.DpEvent],
    epsilon: float,
    delta: float,
    accountant: Accountant,
    limits: tuple[float, float],
    *,
    rises: bool,
    safe: Callable[[float], float],
) -> float:
    """The value at which ε meets the target from below: by Rényi DP, which is quick, then by secants from there.

    ε is close to a power of σ and of T, so the secants are drawn in log ε over log value, and two or three meet
    the target. The result is a value whose own cost was computed: accountants are not exactly monotone in their
    last digits.

    Args:
        event: the composition at a value.
        epsilon: the target.
        delta: at this δ.
        accountant: by this accountant.
        limits: where to look. The cheap end must be within the target.
        rises: whether ε rises with the value.
        safe: rounds a value to one to report, towards the cheap side.
    """
    low, high = limits

    def spent(value: float) -> float:
        return max(epsilon_of(event(value), delta, accountant), _NEXT_TO_NOTHING)

    def rounded(value: float) -> float:
        return min(high, max(low, safe(value)))

    value, slope = _renyi_solution(event, epsilon, delta, limits, rises)
    value = rounded(value)
    seen: dict[float, float] = {}
    while value not in seen and len(seen) < _EVALUATIONS:
        seen[value] = spent(value)
        if epsilon * (1.0 - _CLOSE) <= seen[value] <= epsilon:
            break
        if len(seen) > 1:
            (x0, y0), (x1, y1) = list(seen.items())[-2:]
            secant = (math.log(y1) - math.log(y0)) / (math.log(x1) - math.log(x0))
            slope = secant if secant * slope > 0 else slope
        # Next to ε = 0, where δ allows nearly all of it, the power law breaks down: no leaps there.
        slope = math.copysign(min(4.0, max(0.25, abs(slope))), slope)
        # A little below the target: a first guess just above it would be of no use.
        leap = ((1.0 - _CLOSE / 2.0) * epsilon / seen[value]) ** (1.0 / slope)
        value = rounded(value * min(4.0, max(0.25, leap)))
        ends = _bracket(seen, epsilon, rises)
        if ends is not None and not min(ends) < value < max(ends):
            value = rounded(math.sqrt(ends[0] * ends[1]))
    within = {value: cost for value, cost in seen.items() if cost <= epsilon}
    return max(within, key=within.__getitem__) if within else (low if rises else high)


def _bracket(seen: dict[float, float], epsilon: float, rises: bool) -> tuple[float, float] | None:
    """The values next to the solution, one within the target and one beyond it, where both are known."""
    within = [value for value, cost in seen.items() if cost <= epsilon]
    beyond = [value for value, cost in seen.items() if cost > epsilon]
    if not within or not beyond:
        return None
    return (max(within), min(beyond)) if rises else (min(within), max(beyond))


def _renyi_solution(
    event: Callable[[float], dp_accounting.DpEvent],
    epsilon: float,
    delta: float,
    limits: tuple[float, float],
    rises: bool,
) -> tuple[float, float]:
    """Where Rényi's ε meets the target, or the limit closest to that, and d log ε / d log value there."""

    def cost(value: float) -> float:
        # Rényi's ε is 0 where the noise drowns everything; the slope is drawn in its logarithm.
        return max(epsilon_of(event(value), delta, "rdp"), _NEXT_TO_NOTHING)

    low, high = limits
    if (cost(low) > epsilon) == rises:
        value = low
    elif (cost(high) > epsilon) != rises:
        value = high
    else:
        exponent = calibration.calibrate_dp_mechanism(
            RdpAccountant,
            lambda x: event(10.0**x),
            epsilon,
            delta,
            calibration.ExplicitBracketInterval(math.log10(low), math.log10(high)),
            tol=1e-4,
        )
        value = 10.0**exponent
    aside = min(1.1 * value, high) if value < high else value / 1.1
    slope = (math.log(cost(aside)) - math.log(cost(value))) / (math.log(aside) - math.log(value))
    if not math.isfinite(slope) or slope == 0.0 or (slope > 0) != rises:
        slope = 1.0 if rises else -1.0
    return value, slope


def _round_up(value: float) -> float:
    """Up to four significant digits."""
    text = f"{value:.3e}"
    rounded = float(text)
    if rounded < value:
        mantissa, exponent = text.split("e")
        rounded = float(f"{float(mantissa) + 0.001:.3f}e{exponent}")
    return rounded
