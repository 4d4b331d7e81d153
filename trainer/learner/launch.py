"""This process's place in a launch of several: the variables of torchrun and `accelerate launch`. Imports no torch."""

from __future__ import annotations

import os
from datetime import timedelta

IDLE_TIMEOUT = timedelta(days=30)  # there may be hours without traffic between two rounds


def processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Return this process's rank on its machine, which is the number of its GPU."""
    return int(os.environ.get("LOCAL_RANK", "0"))
