"""DP-Sinkhorn: publish synthetic images of private data with a guarantee that holds.

The names below are the public API. They load on first use: opening a release needs neither the training code
nor its accountant.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from dp_sinkhorn.errors import BudgetExceededError, UserError
    from dp_sinkhorn.estimator import DPSinkhorn
    from dp_sinkhorn.release import Release, load_release
    from dp_sinkhorn.settings import Plan, Settings, plan

_HOMES = {
    "BudgetExceededError": "errors",
    "DPSinkhorn": "estimator",
    "Plan": "settings",
    "Release": "release",
    "Settings": "settings",
    "UserError": "errors",
    "load_release": "release",
    "plan": "settings",
}

__all__ = [
    "BudgetExceededError",
    "DPSinkhorn",
    "Plan",
    "Release",
    "Settings",
    "UserError",
    "__version__",
    "load_release",
    "plan",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
