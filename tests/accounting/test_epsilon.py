"""Reference values of the published runs (docs/privacy.md; RDP to 0.5 %, PLD to 1 %), and accountants' behaviour."""

import math

import dp_accounting
import pytest

from dp_sinkhorn.accounting import compose, decode_event, encode_event, epsilon_of
from dp_sinkhorn.settings import parse_settings, plan


def row_event(noise: float, rate: float, steps: int):
    one = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise / math.sqrt(50)))
    return compose([(one, steps)])


@pytest.mark.parametrize(
    ("noise", "rate", "steps", "delta", "renyi", "pld"),
    [
        (1.5, 1 / 1200, 160_000, 1e-5, 984, 846),
        (1.9, 1 / 1200, 280_000, 1e-5, 494, 462),
        (1.9, 0.00038, 1_700_000, 1e-6, 929, 869),
    ],
)
def test_sound_cost_of_the_published_runs(noise, rate, steps, delta, renyi, pld) -> None:
    event = row_event(noise, rate, steps)
    assert epsilon_of(event, delta, "rdp") == pytest.approx(renyi, rel=0.005)
    assert epsilon_of(event, delta, "pld") == pytest.approx(pld, rel=0.01)


@pytest.mark.parametrize(
    ("preset", "published", "sound"), [("paper-mnist", 9.21, 846), ("paper-fashion-mnist", 9.20, 462)]
)
def test_presets_carry_both_figures(preset, published, sound) -> None:
    result = plan(parse_settings(preset, {}), 60_000)
    assert result.as_published_epsilon == pytest.approx(published, rel=0.005)
    assert result.epsilon == pytest.approx(sound, rel=0.01)


def test_as_published_cost_of_the_celeba_run() -> None:
    settings = parse_settings(
        "paper-mnist",
        {"noise_multiplier": 1.9, "steps": 1_700_000, "delta": 1e-6, "batch_size": 0.00038 * 162_770, "rows": 50},
    )
    assert plan(settings, 162_770).as_published_epsilon == pytest.approx(11.5, rel=0.005)


def test_the_reference_of_subsampled_gaussians() -> None:
    event = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(1.749))
    assert epsilon_of(compose([(event, 1000)]), 1e-5) == pytest.approx(10.0, rel=0.01)


def test_pld_is_never_above_the_renyi_bound_and_no_mechanism_is_free() -> None:
    for noise in (0.5, 4.0):
        for steps in (1, 1000):
            event = compose([(dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(noise)), steps)])
            pld, renyi = epsilon_of(event, 1e-5), epsilon_of(event, 1e-5, "rdp")
            assert 0 <= pld <= renyi
    assert epsilon_of(compose([]), 1e-5) == 0
    assert epsilon_of(dp_accounting.NonPrivateDpEvent(), 1e-5) == math.inf


def test_costs_too_large_for_a_grid_fall_back_to_renyi() -> None:
    event = compose([(dp_accounting.GaussianDpEvent(0.01), 100)])
    assert epsilon_of(event, 1e-5) == epsilon_of(event, 1e-5, "rdp") > 20_000


def test_events_survive_json() -> None:
    event = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(1.5))
    assert decode_event(encode_event(event)) == event
    several = dp_accounting.ComposedDpEvent([dp_accounting.SelfComposedDpEvent(event, 7), event])
    assert decode_event(encode_event(several)) == several
    assert decode_event(encode_event(dp_accounting.NonPrivateDpEvent())) == dp_accounting.NonPrivateDpEvent()
    with pytest.raises((ValueError, AttributeError, TypeError)):
        decode_event({"type": "PrivacyAccountant"})
