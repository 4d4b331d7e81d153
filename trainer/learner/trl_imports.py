"""Imports TRL's GRPO trainer without vLLM.

TRL imports all of vLLM when it is installed, which is half of the import's time, and warns of releases that it does not
know. None of that code is used here: the engine is a process of its own. So, while TRL is imported, vLLM is not to be
found. Does not change TRL, and leaves vLLM importable afterwards.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

__all__ = ["GRPOConfig", "GRPOTrainer"]


@contextlib.contextmanager
def _without(module: str) -> Iterator[None]:
    """Make the module unimportable for a while; None in sys.modules is Python's own mark for that."""
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
