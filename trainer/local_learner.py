"""Learner: one agent's learner in this process, for a process that trains one agent only."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from ratchet import __version__
from ratchet.trainer.errors import TrainerError
from ratchet.trainer.learner.host import LearnerHost
from ratchet.trainer.learner_api import AgentHost, Answer, InProgress, LearnerStatus, OperationRequest
from ratchet.trainer.learner_client import AgentLearner
from ratchet.trainer.learner_service.operations import AgentOperations, CheckpointReferences
from ratchet.trainer.settings.learner_settings import LearnerProcessSettings, LearnerSettings, process_settings_of


class LocalOperations:
    """Runs the operations of an agent on a host of this process, in the caller's thread."""

    def __init__(self, host: AgentHost) -> None:
        self._status = LearnerStatus("local", __version__, "", {}, "none", 1, 1, ready=True, limits=host.limits)
        self._operations = AgentOperations(host, {}, CheckpointReferences(), self._status)

    def status(self) -> LearnerStatus:
        return self._status

    def run(
        self, request: OperationRequest, on_progress: Callable[[InProgress], None] = lambda progress: None
    ) -> Answer:
        rows = 0

        def add(more: int) -> None:
            nonlocal rows
            rows += more
            on_progress(InProgress(0, rows))

        try:
            return self._operations.run(request, add)
        except TrainerError as error:
            return self._operations.failure(request.agent, error)


class Learner(AgentLearner):
    """A base model with the adapter and the optimizer of its only agent.

    `base_model` is a folder or a hub name; `resume_from` is a checkpoint folder written by `save`. Settings that
    `settings` and `process` both have are taken from `settings`. Raises ModelError, SettingError, CheckpointDamaged or
    CheckpointError.
    """

    def __init__(
        self,
        base_model: str,
        settings: LearnerSettings,
        *,
        resume_from: Path | None = None,
        process: LearnerProcessSettings | None = None,
        make_host: Callable[..., LearnerHost] = LearnerHost,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.host = make_host(base_model, process_settings_of(settings, process), clock=clock)
        super().__init__(LocalOperations(self.host), "agent", settings, resume_from)
        self._opened()
