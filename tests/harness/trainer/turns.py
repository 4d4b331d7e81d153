"""Turns of the trainer's daemon on a clock of the test's own."""

from __future__ import annotations

import time
from collections.abc import Callable

from ratchet.trainer.daemon import Daemon


def until(daemon: Daemon, now: float, holds: Callable[[], bool], most: int = 400) -> float:
    """Let the daemon take turns, a second apart, until it holds; return the time then."""
    for _ in range(most):
        daemon.turn(now)
        if holds():
            return now
        now += 1.0
        time.sleep(0.01)
    raise AssertionError(f"it did not come to it: {holds}")
