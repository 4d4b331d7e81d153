"""An agent's controller whose step waits for the work that it starts, so that one step does all that is due."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ratchet.store.store import Store
from ratchet.trainer.agent_controller import AgentController
from ratchet.trainer.background_work import BackgroundWork, Result
from ratchet.trainer.learner_work import LearnerFactory
from ratchet.trainer.settings.trainer_settings import TrainerSettings

_JUDGE_SECONDS = 5.0  # it returns as soon as all is judged; half a second was too short on a busy machine


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
        values = dict[str, Any](values) | {"make_background": AwaitedWork, "judge_wait_seconds": _JUDGE_SECONDS}
        super().__init__(settings, store, learner_factory, **values)
