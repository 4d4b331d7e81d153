"""An agent's controller whose step waits for the work that it starts, so that one step does all that is due."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ratchet.store.store import Store
from ratchet.trainer.background_work import BackgroundWork, Result
from ratchet.trainer.controller.agent_controller import AgentController
from ratchet.trainer.controller.learner_work import LearnerFactory
from ratchet.trainer.settings.trainer_settings import TrainerSettings
from tests.harness.trainer import judge_samples

_JUDGE_SECONDS = 120.0  # it returns as soon as all is judged; five seconds were too short on a busy machine
_PAUSED_SECONDS = 0.5


class AwaitedWork(BackgroundWork):
    """Work in a thread of its own that the caller waits for."""

    def start(self, what: str, work: Callable[[], Result], record: Callable[[Result], bool]) -> None:
        super().start(what, work, record)
        self.wait()


class SteppedController(AgentController):
    """The controller of one agent, with a real learner unless another is given."""

    def __init__(
        self, settings: TrainerSettings, store: Store, learner_factory: LearnerFactory | None = None, **values: Any
    ) -> None:
        if learner_factory is None:
            from tests.harness.trainer.in_process_learner import make_learner  # imports torch

            learner_factory = make_learner
        super().__init__(settings, store, learner_factory, **(values | {"make_background": AwaitedWork}))
        self._judge_runner.max_read_seconds = _JUDGE_SECONDS  # else a busy machine leaves groups for the next step

    def _collect_verdicts(self, now: float) -> bool:
        self._judge_wait_seconds = _JUDGE_SECONDS if judge_samples.pause.is_set() else _PAUSED_SECONDS
        return super()._collect_verdicts(now)


def until(controller: SteppedController, now: float, holds: Callable[[], bool], most: int = 400) -> float:
    """Step the controller, one second per step, until `holds` returns true; return the time then."""
    for _ in range(most):
        controller.step(now)
        if holds():
            return now
        now += 1.0
        time.sleep(0.01)
    raise AssertionError(f"it did not come to it: {holds}")
