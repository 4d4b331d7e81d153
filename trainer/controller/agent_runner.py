"""AgentRunner: one agent in a controller process, from its lease to its end.

    condition   meaning                                                     next
    ---------   ---------------------------------------------------------   -----------------------------------------
    WAITING     another process holds the lease, or a failure's pause       STARTING
    STARTING    the controller is made, in the background                   RUNNING; WAITING after an error
    RUNNING     the controller is stepped                                   STOPPING: a lost lease, an error, a request
    STOPPING    what runs may end, then connections close, in background    WAITING, or STOPPED if that was requested
    STOPPED     the lease is given back

Promises: nothing here blocks, and an error of one agent stays with it: it is logged, raised as the alarm
`agent_failed`, and the agent is started again after a pause that doubles with each failure in a row. Only the loss of a
process of the learner's group is raised: it concerns all agents.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Set
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

from ratchet.store.coordination import ALL_KINDS
from ratchet.store.errors import RecordDamaged, StoreUnavailable
from ratchet.store.reasons import DropReason
from ratchet.store.store import Store
from ratchet.trainer.adapters.base_model_files import DIGESTS, check_files
from ratchet.trainer.background_work import BackgroundWork
from ratchet.trainer.controller.agent_controller import (
    MAX_OVERTAKEN,
    OVERTAKEN,
    AgentController,
)
from ratchet.trainer.controller.agent_leases import AgentLeases, LeaseState
from ratchet.trainer.controller.learner_work import LearnerFactory
from ratchet.trainer.controller.outages import OUTAGE_PAUSE_SECONDS, OUTAGES, OutageAlarm
from ratchet.trainer.errors import TrainerError, WorkerProcessLost
from ratchet.trainer.observability.metrics import MetricsRegistry, TrainerMetrics
from ratchet.trainer.observability.monitors import monitored
from ratchet.trainer.observability.progress import StoredProgress
from ratchet.trainer.release.evaluation import MakeWorkflowEvaluator
from ratchet.trainer.settings.trainer_settings import TrainerSettings

log = logging.getLogger(__name__)

FAILED = "agent_failed"  # alarm
_RETRY_SECONDS, _MAX_RETRY_SECONDS = 5.0, 300.0
_HEALTHY_SECONDS = 60.0  # after this time without an error, the alarm is cleared
_STOP_SECONDS = 20.0  # for a round or a publication that runs
_WATCHING_SECONDS = 1.0  # between steps while something runs that reports no end
_MAX_IDLE_SECONDS = 10.0  # between steps without anything to do
_WAITS_PER_LOOK = 10.0  # steps without anything to do, within the shortest wait of the settings


class AgentCondition(Enum):
    """Where an agent is in its life; the table at the top of this file."""

    WAITING = auto()
    STARTING = auto()
    RUNNING = auto()
    STOPPING = auto()
    STOPPED = auto()


@dataclass(frozen=True, slots=True)
class SharedByAgents:
    """What the agents of a process share."""

    store: Store
    leases: AgentLeases
    metrics: MetricsRegistry
    progress: StoredProgress
    learner_factory: LearnerFactory
    make_workflow_evaluator: MakeWorkflowEvaluator | None
    upstream_key: str | None
    max_judge_threads: Callable[[], int]  # of one agent, when it starts


class AgentRunner:
    """Runs one agent. `wake` makes the process call `turn` soon; it is called in any thread."""

    def __init__(self, settings: TrainerSettings, shared: SharedByAgents, wake: Callable[[], None]) -> None:
        self.settings = settings
        self.alias = settings.model
        self.condition = AgentCondition.WAITING
        self.due_at = 0.0  # when `turn` is called even if nothing happened; Unix seconds
        self.start_error: TrainerError | None = None  # of the first start
        self.has_run = False
        self._shared = shared
        self._wake_process = wake
        self._woken = True  # by the end of our own work, or from outside
        self._waiting: Set[str] = ALL_KINDS  # kinds of activity
        self._background = BackgroundWork(f"agent {self.alias}", self._wake)
        self._controller: AgentController | None = None
        self._monitors = ExitStack()
        self._remove = False
        self._give_up = False  # to another controller
        self._failures = 0  # in a row
        self._outage = OutageAlarm(shared.store, self.alias)  # of the start and of steps
        self._overtaken = 0  # steps in a row
        self._start_at = 0.0  # after a failure or an outage; Unix seconds
        self._started_at = 0.0
        shared.leases.request(self.alias)

    @property
    def is_running(self) -> bool:
        return self.condition is AgentCondition.RUNNING

    def is_due(self, now: float) -> bool:
        """Whether `turn` has something to do."""
        return self._woken or now >= self.due_at

    def look(self, *, changed: bool, waiting: Set[str]) -> None:
        """Learn what others did: step now if something `changed`; a step asks for the kinds that are `waiting` only."""
        self._waiting = waiting
        if changed:
            self.due_at = 0.0

    @property
    def can_give_up(self) -> bool:
        """Whether the agent's lease is held, and no round or publication runs."""
        held = self._shared.leases.state_of(self.alias) is LeaseState.HELD
        return held and not self._remove and (self._controller is None or not self._controller.is_learning)

    @property
    def gives_up(self) -> bool:
        """Whether the agent is being given to another controller."""
        return self._give_up

    def give_up(self) -> None:
        """Let another controller take the agent; what runs may end before."""
        self._give_up = True
        self._wake()

    def remove(self) -> None:
        """Stop the agent for good; `turn` does it step by step until it is STOPPED."""
        self._remove = True
        self._wake()

    def turn(self, now: float) -> None:
        """Do what is due, without waiting. Raises WorkerProcessLost."""
        self._woken = False
        if self.condition is AgentCondition.WAITING:
            self._wait(now)
        elif self.condition is AgentCondition.RUNNING:
            self._run(now)
        else:
            self._collect(now)

    def _wake(self) -> None:
        self._woken = True
        self._wake_process()

    def _wait(self, now: float) -> None:
        if self._remove:
            self._end()
        elif self._give_up:
            self._give_up = False
            self._shared.leases.give_up(self.alias)
        elif self._shared.leases.state_of(self.alias) is not LeaseState.HELD:
            self.due_at = now + _MAX_IDLE_SECONDS  # the lease wakes us
        elif now < self._start_at:
            self.due_at = self._start_at
        else:
            self.condition = AgentCondition.STARTING
            self._background.start("the start", self._make_controller, self._record_start)

    def _run(self, now: float) -> None:
        lease = self._shared.leases.state_of(self.alias)
        if self._remove or self._give_up or lease is LeaseState.WAITING:
            self._begin_stop(_STOP_SECONDS if self._remove or self._give_up else 0.0)
        elif lease is LeaseState.OVERDUE:  # until the store has confirmed or refused it
            self.due_at = now + _WATCHING_SECONDS
        else:
            self._step(now)

    def _step(self, now: float) -> None:
        controller = self._controller
        assert controller is not None
        try:
            if not self._advance(controller, now):
                return
            self._overtaken = 0
            self._outage.end()
        except OUTAGES as outage:
            self._outage.record(outage, now, "a step")
            self.due_at = now + OUTAGE_PAUSE_SECONDS
        except OVERTAKEN as changed:  # by a person, a deletion, or another trainer
            log.warning("event=step_overtaken alias=%s reason=%r", self.alias, str(changed))
            self._overtaken += 1
            if self._overtaken == MAX_OVERTAKEN:
                self._fail(changed, now)
            else:
                self.due_at = now + self.settings.poll_interval_seconds
        except WorkerProcessLost:
            raise
        except Exception as error:  # noqa: BLE001  one agent's judge or plug-in must not end the others
            self._fail(error, now)
        else:
            self._record_health(now)
            self.due_at = now + self._pause(controller)

    def _advance(self, controller: AgentController, now: float) -> bool:
        """Step, or record the end of our own work; return whether it was a step that was completed.

        A trajectory that turns out to be damaged in the store is dropped, and the next step goes on without it.
        """
        try:
            if now < self.due_at:
                controller.react(now)
                return False
            controller.step(now, self._waiting)
        except RecordDamaged as damaged:
            if not self._shared.store.groups.drop_members([damaged.trajectory_id], DropReason.DAMAGED):
                raise
            log.error("event=trajectory_dropped alias=%s reason=%r", self.alias, str(damaged))
            self.due_at = now
            return False
        return True

    def _pause(self, controller: AgentController) -> float:
        """Return the seconds until the next step if nothing happens; one step does all that is due."""
        settings, shortest = self.settings, self.settings.poll_interval_seconds
        if controller.is_watching:
            return max(shortest, _WATCHING_SECONDS)
        waits = (
            settings.group_wait_seconds, settings.round_wait_seconds,
            settings.release.deadline_seconds,
        )  # fmt: skip
        return max(shortest, min(_MAX_IDLE_SECONDS, *(wait / _WAITS_PER_LOOK for wait in waits)))

    def _record_health(self, now: float) -> None:
        if self._failures and now - self._started_at > _HEALTHY_SECONDS:
            self._failures = 0
            self._shared.store.alarms.clear(f"{FAILED}:{self.alias}")

    def _collect(self, now: float) -> None:
        """Go on when the start or the stop is over."""
        try:
            self._background.collect()
        except OUTAGES as outage:
            self._outage.record(outage, now, "the start")
            self.condition = AgentCondition.WAITING
            self.due_at = self._start_at = now + OUTAGE_PAUSE_SECONDS
        except Exception as error:  # noqa: BLE001  as above: a judge is loaded, which is the user's code
            self._fail(error, now)
        else:
            if self._background.is_busy:
                self.due_at = now + _MAX_IDLE_SECONDS
            else:
                self._wake()

    def _make_controller(self) -> AgentController:
        """Return the agent's controller; reads the base model's files and the judge's code."""
        settings, shared = self.settings, self._shared
        check_files(shared.store, self.alias, settings.base_model, settings.checkpoints.parent / DIGESTS)
        controller = AgentController(
            settings,
            shared.store,
            shared.learner_factory,
            shared.upstream_key,
            shared.make_workflow_evaluator,
            metrics=TrainerMetrics(self.alias, metrics=shared.metrics),
            stored_progress=shared.progress,
            on_change=self._wake,
            max_judge_threads=shared.max_judge_threads(),
        )
        folder = settings.checkpoints.parent / "monitors"
        self._monitors.enter_context(monitored(shared.store, self.alias, settings.report_to, folder))
        if not self._failures:
            shared.store.alarms.clear(f"{FAILED}:{self.alias}")
        return controller

    def _record_start(self, controller: AgentController) -> bool:
        self._controller = controller
        self._started_at = time.time()
        self.has_run = True
        self.condition = AgentCondition.RUNNING
        return True

    def _begin_stop(self, timeout: float) -> None:
        self.condition = AgentCondition.STOPPING
        controller, self._controller = self._controller, None
        self._background.start("the stop", partial(self._stop, controller, timeout), self._record_stop)

    def _stop(self, controller: AgentController | None, timeout: float) -> None:
        monitors, self._monitors = self._monitors, ExitStack()
        with monitors:
            if controller is not None:
                controller.close(timeout)

    def _record_stop(self, _: None) -> bool:
        self.condition = AgentCondition.WAITING
        return True

    def _end(self) -> None:
        self._shared.leases.release(self.alias)
        self._shared.metrics.remove_agent(self.alias)
        self._background.close()
        self.condition = AgentCondition.STOPPED
        log.info("event=agent_stopped alias=%s", self.alias)

    def _fail(self, error: Exception, now: float) -> None:
        """Stop the agent and start it again later."""
        pause = min(_RETRY_SECONDS * 2**self._failures, _MAX_RETRY_SECONDS)
        self._failures += 1
        if isinstance(error, TrainerError):
            log.error("event=agent_failed alias=%s error=%s reason=%r", self.alias, type(error).__name__, str(error))
        else:
            log.error("event=agent_failed alias=%s error=%s", self.alias, type(error).__name__, exc_info=error)
        if not self.has_run and isinstance(error, TrainerError):
            self.start_error = error
        reason = f"{type(error).__name__}: {error}"
        try:
            self._shared.store.alarms.raise_(
                f"{FAILED}:{self.alias}",
                f"{self.alias} is not trained: {reason}; it is started again in {pause:g} s, other agents go on",
            )
        except StoreUnavailable as outage:
            log.warning("event=outage alias=%s reason=%r", self.alias, str(outage))
        if self.condition is AgentCondition.RUNNING:
            self._begin_stop(0.0)
        else:
            self.condition = AgentCondition.WAITING
        self.due_at = self._start_at = now + pause
