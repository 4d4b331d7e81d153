"""Types of setting values: server URLs, and the GPUs of a process in the format of CUDA_VISIBLE_DEVICES.

A setting of type `Devices` overrides the environment variable. Without either, every GPU is visible; an empty string
hides all.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

from ratchet.store.access.replicas import plain_url

VARIABLE = "CUDA_VISIBLE_DEVICES"

_DEVICE = re.compile(r"\d+|(GPU|MIG)-[\w/.-]+")


def _as_text(value: Any) -> Any:
    """Return `0`, `[0, 1]` or `"0,1"` in the format of CUDA_VISIBLE_DEVICES."""
    if value is None:
        return None
    parts = value if isinstance(value, list | tuple) else str(value).split(",") if str(value).strip() else []
    names = [str(part).strip() for part in parts]
    for name in names:
        if not _DEVICE.fullmatch(name):
            raise ValueError(
                f"{name!r} is not a device: give numbers, or UUIDs as nvidia-smi -L prints them, such as 0,1"
            )
    return ",".join(names)


PlainUrl = Annotated[str, AfterValidator(plain_url)]  # http(s), stored without a trailing /v1
Devices = Annotated[str | None, BeforeValidator(_as_text)]


def pinned(devices: str | None) -> dict[str, str]:
    """Return the environment variable for these devices; empty if the environment's own applies."""
    return {} if devices is None else {VARIABLE: devices}
