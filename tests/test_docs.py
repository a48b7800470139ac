"""The documentation says what the code does."""

import re
from pathlib import Path

import pytest

from dp_sinkhorn.settings import PRESETS, Settings, parse_settings

ROOT = Path(__file__).parent.parent


def test_the_new_mechanism_of_the_docs_runs_as_it_stands() -> None:
    from dp_sinkhorn.mechanisms import mechanism_class
    from dp_sinkhorn.training import train
    from tests.mechanisms.worlds import answer, generated, neighbours
    from tests.toy import records, small_settings

    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "new-mechanism.md").read_text(), re.DOTALL)
    space: dict[str, object] = {"__name__": "docs"}
    for block in blocks:
        exec(compile(block, "docs/new-mechanism.md", "exec", dont_inherit=True), space)
    release = train(records(), small_settings(mechanism="soft-nearest", epsilon=3.0, steps=5))
    assert release.privacy.mechanism == "soft-nearest"
    assert 0 < release.privacy.epsilon <= 3

    mechanism = mechanism_class("soft-nearest")(
        sampling_rate=0.5, noise_multiplier=1.0, rows=6, clip=0.5, temperature=1.0
    )
    for kind in ("random", "outlier", "duplicate", "flip"):
        for seed in range(10):
            batch = generated(mechanism, seed)
            moved = [answer(mechanism, batch, *pair) for pair in neighbours(kind, seed)]
            assert (moved[1] - moved[0]).norm() <= mechanism.sensitivity * (1 + 1e-12)


def test_every_setting_and_preset_is_documented() -> None:
    text = (ROOT / "docs" / "settings.md").read_text()
    assert not [name for name in [*Settings.model_fields, *PRESETS] if f"`{name}`" not in text]


@pytest.mark.parametrize("preset", [name for name in PRESETS if name.startswith("paper-")])
def test_every_value_of_the_paper_presets_is_traced(preset: str) -> None:
    text = (ROOT / "docs" / "paper-map.md").read_text()
    assert not [name for name in PRESETS[preset] if f"`{name}`" not in text and name != "generator"]
    parse_settings(preset, {})


def test_links_between_documents_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *ROOT.glob("docs/*.md"), ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
