"""Imports TRL's GRPO trainer without vLLM.

TRL imports vLLM if it is installed, which takes half of the import time, and warns about unknown releases. The learner
does not use it, so vLLM is hidden during the import and importable again afterwards.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

__all__ = ["GRPOConfig", "GRPOTrainer"]


@contextlib.contextmanager
def _without(module: str) -> Iterator[None]:
    """Make the module unimportable in the block; Python refuses modules that are None in sys.modules."""
    modules: dict[str, Any] = sys.modules
    loaded = {module: modules[module]} if module in modules else {}
    modules[module] = None
    try:
        yield
    finally:
        del modules[module]
        modules.update(loaded)


with _without("vllm"):
    from trl import GRPOConfig, GRPOTrainer
