"""The trainer's process: signals, the lease of its alias, the controller and the monitors.

Promises: only one trainer of an alias works at a time, the others wait; SIGTERM and SIGINT end it with exit code 0; an
error that waiting cannot fix ends it with 1 and one log line with the reason. Of several processes (`accelerate
launch`) rank 0 runs the controller, and the others train with it.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from functools import partial
from pathlib import Path
from types import FrameType

from ratchet.store.errors import StoreError, StoreUnavailable
from ratchet.store.store import Store, open_store
from ratchet.trainer.adapters.base_model_files import DIGESTS, check_files
from ratchet.trainer.controller_loop import OUTAGE_PAUSE_SECONDS, Controller, LearnerFactory, make_learner
from ratchet.trainer.errors import TrainerError
from ratchet.trainer.learner import distributed
from ratchet.trainer.learner_protocol import LearnerProtocol
from ratchet.trainer.lease import Lease
from ratchet.trainer.observability.monitors.monitor_thread import check_installed, monitored
from ratchet.trainer.release.evaluation_runner import MakeWorkflowEvaluator
from ratchet.trainer.settings.trainer_settings import TrainerSettings

log = logging.getLogger(__name__)


def run(
    settings: TrainerSettings,
    learner_factory: LearnerFactory = make_learner,
    make_workflow_evaluator: MakeWorkflowEvaluator | None = None,
) -> int:
    """Run the trainer until SIGTERM or SIGINT; return the exit code. Waits for the lease of the alias."""
    if distributed.processes() == 1:
        return _run_controller(settings, learner_factory, make_workflow_evaluator)
    channel = distributed.FollowerChannel()
    if not distributed.is_leader():
        return distributed.follow(channel)
    try:
        return _run_controller(settings, partial(_make_rank_zero_learner, channel), make_workflow_evaluator)
    finally:
        channel.close()


def _make_rank_zero_learner(
    channel: distributed.FollowerChannel, settings: TrainerSettings, resume_from: Path | None
) -> LearnerProtocol:
    return distributed.RankZeroLearner(
        channel, settings.base_model, settings.learner, workdir=settings.checkpoints.parent, resume_from=resume_from
    )


def _run_controller(
    settings: TrainerSettings, learner_factory: LearnerFactory, make_workflow_evaluator: MakeWorkflowEvaluator | None
) -> int:
    stop = threading.Event()

    def request_stop(signum: int, _: FrameType | None) -> None:
        log.info("event=stopping signal=%s", signal.Signals(signum).name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, request_stop)
    try:
        check_installed(settings.report_to)
        store = open_store(settings.store)
        with Lease(store, f"trainer:{settings.model}", settings.lease_seconds) as lease:
            if lease.wait(stop) and (
                controller := _make_controller(settings, store, stop, learner_factory, make_workflow_evaluator)
            ):
                with monitored(store, settings.model, settings.report_to, settings.checkpoints.parent / "monitors"):
                    controller.run(lease)
                controller.close()
        store.close()
    except (TrainerError, StoreError) as error:
        log.error("event=trainer_stopped error=%s reason=%r", type(error).__name__, str(error))
        return 1
    log.info("event=trainer_stopped")
    return 0


def _make_controller(
    settings: TrainerSettings,
    store: Store,
    stop: threading.Event,
    learner_factory: LearnerFactory,
    make_workflow_evaluator: MakeWorkflowEvaluator | None,
) -> Controller | None:
    """Return the controller as soon as the store answers; None if `stop` came first."""
    while not stop.is_set():
        try:
            check_files(store, settings.model, settings.base_model, settings.checkpoints.parent / DIGESTS)
            return Controller(
                settings,
                store,
                stop,
                os.environ.get("RATCHET_UPSTREAM_API_KEY"),
                learner_factory,
                make_workflow_evaluator,
            )
        except StoreUnavailable as outage:
            log.warning("event=outage reason=%r", str(outage))
            stop.wait(OUTAGE_PAUSE_SECONDS)
    return None
