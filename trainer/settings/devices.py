"""Devices: which GPUs a process may see, as CUDA_VISIBLE_DEVICES has it. Imports nothing heavy.

A setting wins over the variable that the process was started with; without one the variable holds, and without either
every GPU is seen. An empty text hides them all.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator

VARIABLE = "CUDA_VISIBLE_DEVICES"

_ONE = re.compile(r"\d+|(GPU|MIG)-[\w/.-]+")


def _as_text(value: Any) -> Any:
    """Return `0`, `[0, 1]` and `"0,1"` as CUDA reads them."""
    if value is None:
        return None
    parts = value if isinstance(value, list | tuple) else str(value).split(",") if str(value).strip() else []
    names = [str(part).strip() for part in parts]
    for name in names:
        if not _ONE.fullmatch(name):
            raise ValueError(f"{name!r} is no device: give numbers, or UUIDs as nvidia-smi -L shows them, such as 0,1")
    return ",".join(names)


Devices = Annotated[str | None, BeforeValidator(_as_text)]


def pinned(devices: str | None) -> dict[str, str]:
    """Return the variable that pins a process; nothing where the environment's own holds."""
    return {} if devices is None else {VARIABLE: devices}
