"""`plan` solves for any one of ε, σ and T, for every mechanism, within the budget and close to it."""

import time

import dp_accounting
import pytest

from dp_sinkhorn import mechanisms
from dp_sinkhorn.errors import UserError
from dp_sinkhorn.mechanisms import BatchMechanism
from dp_sinkhorn.settings import default_delta, parse_settings, plan

MECHANISMS = ["per_record", "row", "batch", "parameter"]


def planned(records: int = 60_000, **overrides):
    return plan(parse_settings(None, overrides), records)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_noise_is_solved_for(mechanism: str) -> None:
    start = time.perf_counter()
    result = planned(mechanism=mechanism, epsilon=3, steps=2000)
    assert time.perf_counter() - start < 30
    assert 0.98 * 3 <= result.epsilon <= 3
    assert planned(mechanism=mechanism, noise_multiplier=result.noise_multiplier * 0.99, steps=2000).epsilon > 3


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_steps_are_solved_for(mechanism: str) -> None:
    noise = 7.0 if mechanism == "row" else 1.0
    result = planned(mechanism=mechanism, epsilon=3, noise_multiplier=noise, batch_size=50)
    assert result.epsilon <= 3
    more = round(result.steps * 1.01) + 1
    assert planned(mechanism=mechanism, noise_multiplier=noise, batch_size=50, steps=more).epsilon > 3


@pytest.mark.parametrize("epsilon", [1e-4, 1e-3, 0.02])
def test_noise_is_solved_for_next_to_no_epsilon(epsilon: float) -> None:
    """There δ allows nearly all of the loss, and ε falls to 0 at a finite σ: no power law, and no wild leaps."""
    result = planned(epsilon=epsilon, steps=500)
    assert result.epsilon <= epsilon
    assert planned(noise_multiplier=result.noise_multiplier * 0.97, steps=500).epsilon > epsilon


def test_few_steps_are_counted_exactly() -> None:
    result = planned(mechanism="batch", epsilon=2, noise_multiplier=4, batch_size=60_000)
    assert planned(mechanism="batch", noise_multiplier=4, batch_size=60_000, steps=result.steps).epsilon <= 2
    assert planned(mechanism="batch", noise_multiplier=4, batch_size=60_000, steps=result.steps + 1).epsilon > 2


def test_epsilon_is_solved_for() -> None:
    result = planned(mechanism="batch", batch_size=6000, noise_multiplier=1.749, steps=1000)
    assert result.epsilon == pytest.approx(10.0, rel=0.001)
    assert result.delta == 1e-5
    assert result.sampling_rate == 0.1
    assert result.target_epsilon == result.epsilon
    assert result.as_published_epsilon is None


def test_the_renyi_accountant_can_be_chosen() -> None:
    pld = planned(mechanism="batch", epsilon=3, steps=500)
    renyi = planned(mechanism="batch", epsilon=3, steps=500, accountant="rdp")
    assert renyi.noise_multiplier > pld.noise_multiplier
    assert renyi.accountant == "rdp"


def test_noise_sits_at_the_reference() -> None:
    assert planned(mechanism="batch", batch_size=6000, epsilon=10, steps=1000).noise_multiplier == pytest.approx(
        1.749, abs=0.002
    )


def test_rows_follow_the_batch_unless_given() -> None:
    """Algorithm 1 sets n = qM; the multiplier of the event is σ/√n."""
    assert planned(
        mechanism="row", batch_size=100, noise_multiplier=5, steps=10
    ).event_noise_multiplier == pytest.approx(0.5)
    fewer = planned(mechanism="row", batch_size=100, rows=25, noise_multiplier=5, steps=10)
    assert fewer.event_noise_multiplier == pytest.approx(1.0)


def test_default_delta_is_a_power_of_ten_below_one_over_records() -> None:
    assert [default_delta(count) for count in (100, 60_000, 99_999, 100_000, 162_770, 10**6)] == [
        1e-5, 1e-5, 1e-5, 1e-6, 1e-6, 1e-7,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"mechanism": "row", "epsilon": 10, "noise_multiplier": 1.5, "steps": 160_000, "batch_size": 50},
            r"cost epsilon=84\d.* over the target of 10",
        ),
        ({"epsilon": 0.001, "noise_multiplier": 0.1}, "a single step costs epsilon"),
        ({"delta": 0.001, "epsilon": 1}, r"delta=0.001 is not below 1/records"),
        ({"batch_size": 70_000}, "batch_size 70000 is larger than the number of records, 60000"),
        ({"noise_multiplier": 1e-200}, "setting noise_multiplier=1e-200"),
        ({"exponent": 229}, "setting exponent=229"),
        ({"mechanism": "nonprivate", "epsilon": 1}, "'nonprivate' has no epsilon"),
        ({"mechanism": "rowe"}, "unknown mechanism 'rowe'"),
        ({"bach_size": 7}, "unknown setting 'bach_size'; known settings: mechanism, epsilon"),
        ({"steps": "many"}, "setting steps='many'"),
        ({"epsilon": -1}, "setting epsilon=-1"),
        ({"epsilon": float("nan")}, "setting epsilon=nan"),
        ({"l1_weight": 0, "l2_weight": 0}, "cannot both be 0"),
    ],
)
def test_bad_plans_are_explained(overrides, message) -> None:
    with pytest.raises(UserError, match=message):
        planned(**overrides)


def test_unknown_preset_and_too_few_records() -> None:
    with pytest.raises(UserError, match="unknown preset 'mnist'; choose one of digits, digits-row, paper-mnist"):
        parse_settings("mnist", {})
    with pytest.raises(UserError, match="at least two records"):
        planned(records=1)


def test_a_mechanism_without_a_finite_cost_is_refused_unless_it_says_so(monkeypatch) -> None:
    class Leaky(BatchMechanism):
        name = "leaky"
        event = dp_accounting.NonPrivateDpEvent()

    monkeypatch.setitem(mechanisms._REGISTRY, "leaky", Leaky)
    with pytest.raises(UserError, match="mechanism 'leaky' has no finite epsilon"):
        planned(mechanism="leaky", noise_multiplier=1, steps=2)


def test_a_tiny_delta_has_a_finite_epsilon() -> None:
    assert planned(mechanism="batch", noise_multiplier=1, steps=2, delta=1e-16, batch_size=50).epsilon < 3


def test_nonprivate_has_no_epsilon() -> None:
    result = planned(mechanism="nonprivate", steps=10)
    assert result.epsilon is None
    assert result.noise_multiplier == 0
