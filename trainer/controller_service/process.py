"""The controller's process: signals, the store, the agents. Imports no torch; the learner is passed in.

Promises: only one trainer of an agent works at a time, the others wait; SIGTERM and SIGINT end it with exit code 0; an
error that concerns all agents and that waiting cannot fix ends it with 1 and one log line with the reason.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from types import FrameType

from ratchet.store.errors import StoreError
from ratchet.store.store import open_store
from ratchet.trainer.controller_service.controller_process import Agents, ControllerProcess
from ratchet.trainer.controller_service.learner_work import LearnerFactory
from ratchet.trainer.errors import TrainerError
from ratchet.trainer.observability.monitors import check_installed
from ratchet.trainer.release.evaluation_runner import MakeWorkflowEvaluator

log = logging.getLogger(__name__)


def run(
    agents: Agents,
    learner_factory: LearnerFactory,
    make_workflow_evaluator: MakeWorkflowEvaluator | None = None,
    on_start: Callable[[ControllerProcess], None] | None = None,
) -> int:
    """Serve the agents until SIGTERM or SIGINT; return the exit code.

    `on_start` receives the process before it serves, for a thread that calls `set_agents` later.
    """
    process: ControllerProcess | None = None

    def request_stop(signum: int, _: FrameType | None) -> None:
        log.info("event=stopping signal=%s", signal.Signals(signum).name)
        if process is None:
            raise SystemExit(0)
        process.stop()

    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, request_stop)
        for settings in agents.values():
            check_installed(settings.report_to)
        store = open_store(next(iter(agents.values())).store)
        upstream_key = os.environ.get("RATCHET_UPSTREAM_API_KEY")
        process = ControllerProcess(store, agents, learner_factory, make_workflow_evaluator, upstream_key)
        if on_start is not None:
            on_start(process)
        process.run()
        store.close()
    except (TrainerError, StoreError) as error:
        log.error("event=trainer_stopped error=%s reason=%r", type(error).__name__, str(error))
        return 1
    log.info("event=trainer_stopped")
    return 0
