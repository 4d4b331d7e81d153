"""The optimizer of a method: gepa or mipro."""

from __future__ import annotations

import importlib.util
from typing import Final, get_args

from ratchet.trainer.errors import OptimizerMissing, TuningError
from ratchet.tuner.prompts.optimizer import PromptOptimizer
from ratchet.tuner.settings.prompt_settings import Method

METHODS: Final[tuple[str, ...]] = get_args(Method)

_NEEDS = {"gepa": ("gepa",), "mipro": ("dspy", "optuna")}


def make_optimizer(method: str) -> PromptOptimizer:
    """Return the optimiser of a method. Raises OptimizerMissing with the pip command, TuningError."""
    if method not in METHODS:
        raise TuningError(f"--method {method}: use {' or '.join(METHODS)}")
    missing = [name for name in _NEEDS[method] if importlib.util.find_spec(name) is None]
    if missing:
        raise OptimizerMissing(
            f"--method {method} needs {' and '.join(missing)}: pip install 'ratchet-rl[tune-{method}]'"
        )
    if method == "gepa":
        from ratchet.tuner.prompts.gepa import Gepa

        return Gepa()
    from ratchet.tuner.prompts.mipro import Mipro

    return Mipro()
