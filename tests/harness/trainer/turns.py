"""Steps of the trainer's controller on the test's own clock."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.harness.trainer.stepped_controller import SteppedController


def until(controller: SteppedController, now: float, holds: Callable[[], bool], most: int = 400) -> float:
    """Step the controller, one second per step, until `holds` returns true; return the time then."""
    for _ in range(most):
        controller.step(now)
        if holds():
            return now
        now += 1.0
        time.sleep(0.01)
    raise AssertionError(f"it did not come to it: {holds}")
