"""The controller's process: every agent in a thread of its own, under a lease, until a signal.

    an agent    meaning                                                     next
    ---------   ---------------------------------------------------------   ------------------------------------------
    waits       another process holds its lease, or a failure's pause       runs
    runs        its controller is made, then stepped                        waits, after a lost lease or an error; over
    over        the lease is given back                                     a new one, if it has other settings

Promises: only one trainer of an agent works at a time, the others wait; one agent's judge, round or failure delays no
other: its error is logged, raised as the alarm `agent_failed`, and it is started again after a pause that doubles with
each failure in a row. The process ends only for what concerns all agents: SIGTERM and SIGINT (exit code 0), a store
that cannot be used, a lost process of the learner's group, or agents none of which can be started (1, and a log line
with the reason). One query for all agents tells what others did in the store (`store.activity`). Imports no torch; the
learner is passed in.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from types import FrameType

from ratchet.store.coordination import ALL_KINDS, AgentActivity, has_grown
from ratchet.store.errors import RecordDamaged, StoreError, StoreUnavailable
from ratchet.store.reasons import DropReason
from ratchet.store.store import Store, open_store
from ratchet.trainer.adapters.base_model_files import DIGESTS, check_files
from ratchet.trainer.controller.agent_controller import (
    MAX_OVERTAKEN,
    OUTAGE_PAUSE_SECONDS,
    OUTAGES,
    OVERTAKEN,
    AgentController,
    Outages,
)
from ratchet.trainer.controller.learner_work import LearnerFactory
from ratchet.trainer.errors import TrainerError, WorkerProcessLost
from ratchet.trainer.lease import Lease
from ratchet.trainer.observability.metrics import MetricsRegistry, TrainerMetrics
from ratchet.trainer.observability.monitors import check_installed, monitored
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
_MAX_JUDGE_THREADS = 256  # of all agents; each agent has its share of them for itself
_END_SECONDS = 30.0  # for all agents at the end

Agents = Mapping[str, TrainerSettings]


class _AgentThread:
    """One agent, in a thread of its own from its lease to its end."""

    def __init__(self, settings: TrainerSettings, process: ControllerProcess) -> None:
        self.settings = settings
        self.is_running = self.is_over = False  # its controller is stepped; its thread has ended
        self.has_run = False
        self.start_error: TrainerError | None = None  # of the first start
        self.fatal: BaseException | None = None  # ends the process
        self._process = process
        self._store = process.store
        self._alias = settings.model
        self._stop = threading.Event()
        self._woken = threading.Event()  # by the end of our own work, or from outside
        self._changed = False  # in the store, by others
        self._waiting: Set[str] = ALL_KINDS  # kinds of activity
        self._outage = Outages(self._alias, self._store)  # of the start and of steps
        self._failures = 0  # in a row
        self._thread = threading.Thread(target=self._serve, name=f"agent {self._alias}", daemon=True)
        self._thread.start()

    def look(self, *, changed: bool, waiting: Set[str]) -> None:
        """Learn what others did: step now if something `changed`; a step asks for the kinds that are `waiting` only."""
        self._waiting = waiting
        if changed:
            self._changed = True
            self._woken.set()

    def stop(self) -> None:
        """Stop the agent for good; what runs may end."""
        self._stop.set()
        self._woken.set()

    def join(self, timeout: float) -> None:
        self._thread.join(timeout)

    def _serve(self) -> None:
        try:
            while not self._stop.is_set():
                seconds = self.settings.lease_seconds
                with Lease(self._store, f"trainer:{self._alias}", seconds, self._woken.set) as lease:
                    if lease.wait(self._stop):
                        self._work_under(lease)
        except BaseException as error:  # noqa: BLE001  raised again by the process
            self.fatal = error
        finally:
            self._process.metrics.remove_agent(self._alias)
            log.info("event=agent_stopped alias=%s", self._alias)
            self.is_over = True
            self._process.wake()

    def _work_under(self, lease: Lease) -> None:
        """Start and step the agent, again after a failure, while the lease is ours. Raises WorkerProcessLost."""
        while not self._stop.is_set():
            try:
                if lease.is_held():
                    with self._controller() as controller:
                        self._step_until_stopped(controller, lease)
                return
            except OUTAGES as outage:
                self._outage.record(outage, time.time(), "the start")
                self._stop.wait(OUTAGE_PAUSE_SECONDS)
            except WorkerProcessLost:
                raise
            except Exception as error:  # noqa: BLE001  one agent's judge or plug-in must not end the others
                self._stop.wait(self._record_failure(error))

    @contextmanager
    def _controller(self) -> Iterator[AgentController]:
        """Make the agent's controller and close it; reads the base model's files and the judge's code."""
        settings, process = self.settings, self._process
        check_files(self._store, self._alias, settings.base_model, settings.checkpoints.parent / DIGESTS)
        controller = AgentController(
            settings,
            self._store,
            process.learner_factory,
            process.upstream_key,
            process.make_workflow_evaluator,
            metrics=TrainerMetrics(self._alias, metrics=process.metrics),
            stored_progress=process.progress,
            on_change=self._woken.set,
            max_judge_threads=process.judge_threads,
        )
        with monitored(self._store, self._alias, settings.report_to, settings.checkpoints.parent / "monitors"):
            try:
                if not self._failures:
                    self._store.alarms.clear(f"{FAILED}:{self._alias}")
                self.is_running = self.has_run = True
                process.wake()
                yield controller
            finally:
                self.is_running = False
                controller.close(_STOP_SECONDS if self._stop.is_set() else 0.0)

    def _step_until_stopped(self, controller: AgentController, lease: Lease) -> None:
        """Step when something happened, and now and then; react to the end of our own work at once."""
        started_at, due_at, overtaken = time.time(), 0.0, 0
        while not self._stop.is_set():
            now, pause = time.time(), 0.0
            self._woken.clear()
            if self._changed:
                self._changed, due_at = False, 0.0
            try:
                if not lease.is_held():
                    return
                if now < due_at:
                    controller.react(now)
                    pause = due_at - now
                else:
                    controller.step(now, self._waiting)
                    overtaken, pause = 0, self._pause(controller)
                    self._outage.end(now)
                    if self._failures and now - started_at > _HEALTHY_SECONDS:
                        self._failures = 0
                        self._store.alarms.clear(f"{FAILED}:{self._alias}")
            except RecordDamaged as damaged:  # it is dropped, and the next step goes on without it
                if not self._store.groups.drop_members([damaged.trajectory_id], DropReason.DAMAGED):
                    raise
                log.error("event=trajectory_dropped alias=%s reason=%r", self._alias, str(damaged))
            except OUTAGES as outage:
                self._outage.record(outage, now, "a step")
                pause = OUTAGE_PAUSE_SECONDS
            except OVERTAKEN as changed:  # by a person, a deletion, or another trainer
                log.warning("event=step_overtaken alias=%s reason=%r", self._alias, str(changed))
                overtaken, pause = overtaken + 1, self.settings.poll_interval_seconds
                if overtaken == MAX_OVERTAKEN:
                    raise
            due_at = now + pause
            self._woken.wait(max(0.0, due_at - time.time()))

    def _pause(self, controller: AgentController) -> float:
        """Return the seconds until the next step if nothing happens; one step does all that is due."""
        settings, shortest = self.settings, self.settings.poll_interval_seconds
        if controller.is_watching:
            return max(shortest, _WATCHING_SECONDS)
        waits = settings.group_wait_seconds, settings.round_wait_seconds, settings.release.deadline_seconds
        return max(shortest, min(_MAX_IDLE_SECONDS, *(wait / _WAITS_PER_LOOK for wait in waits)))

    def _record_failure(self, error: Exception) -> float:
        """Log an error and raise its alarm; return the seconds until the next start."""
        pause = min(_RETRY_SECONDS * 2.0**self._failures, _MAX_RETRY_SECONDS)
        self._failures += 1
        kind, trace = type(error).__name__, None if isinstance(error, TrainerError) else error
        log.error("event=agent_failed alias=%s error=%s reason=%r", self._alias, kind, str(error), exc_info=trace)
        if not self.has_run and isinstance(error, TrainerError):
            self.start_error = error
        try:
            self._store.alarms.raise_(
                f"{FAILED}:{self._alias}",
                f"{self._alias} is not trained: {kind}: {error}; it starts again in {pause:g} s, other agents go on",
            )
        except StoreUnavailable as outage:
            log.warning("event=outage alias=%s reason=%r", self._alias, str(outage))
        self._process.wake()
        return pause


class QueryPacing:
    """The pauses between the queries for all agents, so that they take a small share of the time in a large store too;
    `shortest` in seconds.
    """

    _MAX_SHARE = 0.02  # of the time
    # Of so many queries the fastest counts: on a busy machine a single one takes a second, without a reason in the
    # store.
    _QUERIES = 3

    def __init__(self, shortest: float) -> None:
        self._shortest = shortest
        self._latest: deque[float] = deque([0.0] * self._QUERIES, maxlen=self._QUERIES)

    def pause_after(self, seconds: float) -> float:
        """Return the pause in seconds after a query that took `seconds`."""
        self._latest.append(seconds)
        return max(self._shortest, min(self._latest) / self._MAX_SHARE)


class ControllerProcess:
    """The agents of one process. `set_agents`, `wake` and `stop` may be called in any thread."""

    def __init__(
        self,
        store: Store,
        agents: Agents,
        learner_factory: LearnerFactory,
        make_workflow_evaluator: MakeWorkflowEvaluator | None = None,
        upstream_key: str | None = None,
    ) -> None:
        """`agents` are the settings by name, at least one; what all agents share is taken from the first."""
        first = next(iter(agents.values()))
        self.store, self.upstream_key = store, upstream_key
        self.learner_factory, self.make_workflow_evaluator = learner_factory, make_workflow_evaluator
        self.metrics, self.progress = MetricsRegistry(store), StoredProgress(store)
        if first.metrics_port is not None:
            self.metrics.serve(first.metrics_host, first.metrics_port)
        self._poll_seconds = first.poll_interval_seconds
        self._pacing = QueryPacing(self._poll_seconds)
        self._wanted = dict(agents)
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()  # its put may be called by a signal handler
        self._stopping = False
        self._agents: dict[str, _AgentThread] = {}
        self._activity: dict[str, AgentActivity] = {}
        self._look_at = 0.0  # monotonic
        self._outages = Outages()
        self._has_run = False

    @property
    def running(self) -> dict[str, bool]:
        """The agents of this process, each with whether it is stepped."""
        return {alias: agent.is_running for alias, agent in dict(self._agents).items()}

    @property
    def judge_threads(self) -> int:
        """Of one agent, when it starts."""
        return max(2, _MAX_JUDGE_THREADS // max(1, len(self._wanted)))

    def set_agents(self, agents: Agents) -> None:
        """Serve these agents from now on: new ones are started, others stopped, those with new settings both.

        Returns at once. Agents whose settings are equal are left alone.
        """
        self._wanted = dict(agents)
        self.wake()

    def wake(self) -> None:
        self._wakes.put(None)

    def stop(self) -> None:
        """Make `run` return; also for signal handlers."""
        self._stopping = True
        self._wakes.put(None)

    def run(self) -> None:
        """Serve the agents until `stop`. Raises StoreError, WorkerProcessLost, TrainerError if no agent can start."""
        try:
            while not self._stopping:
                self._arrange()
                self._look()
                self._check()
                self.progress.flush()
                self._pause(self._next_due())
        finally:
            self._close()

    def _arrange(self) -> None:
        """Start and stop agents as `set_agents` wants."""
        wanted = self._wanted
        for alias, agent in tuple(self._agents.items()):
            if wanted.get(alias) != agent.settings:
                agent.stop()
            if agent.is_over and agent.fatal is None:
                del self._agents[alias]
        for alias, settings in wanted.items():
            if alias not in self._agents:
                self._agents[alias] = _AgentThread(settings, self)

    def _look(self) -> None:
        """Let the agents look that something has happened to in the store."""
        running = {alias: agent for alias, agent in self._agents.items() if agent.is_running}
        started = time.monotonic()
        if not running or started < self._look_at:
            return
        pause = self._poll_seconds
        try:
            activity = self.store.activity.read(min(one.settings.seal_after_idle_seconds for one in running.values()))
        except StoreUnavailable as outage:
            self._outages.record(outage, time.time(), "looking for work")
            activity = {alias: dict.fromkeys(ALL_KINDS, 0) for alias in running}  # anything may wait
        else:
            self._outages.end(time.time())
            pause = self._pacing.pause_after(time.monotonic() - started)
        self._look_at = time.monotonic() + pause
        for alias, agent in running.items():
            before, after = self._activity.get(alias, {}), activity.get(alias, {})
            agent.look(changed=has_grown(before, after), waiting=frozenset(after))
        self._activity = activity

    def _check(self) -> None:
        """Raise what ended an agent's thread, and the error of a start if all have failed and none has ever run."""
        agents = self._agents.values()
        for agent in agents:
            if agent.fatal is not None:
                raise agent.fatal
        self._has_run = self._has_run or any(agent.has_run for agent in agents)
        errors = [agent.start_error for agent in agents]
        if not self._has_run and errors and (error := errors[0]) is not None and None not in errors:
            raise error

    def _next_due(self) -> float:
        """Return the seconds until something is due."""
        due = [_MAX_IDLE_SECONDS]
        if any(agent.is_running for agent in self._agents.values()):
            due.append(self._look_at - time.monotonic())
        if (flush_in := self.progress.due_in) is not None:
            due.append(flush_in)
        return max(0.0, min(due))

    def _pause(self, seconds: float) -> None:
        """Wait until somebody wakes us, at most that long."""
        try:
            self._wakes.get(timeout=seconds)
            while True:
                self._wakes.get_nowait()
        except queue.Empty:
            pass

    def _close(self) -> None:
        """Stop all agents, which give their leases back; one that does not end in time is left behind."""
        deadline = time.monotonic() + _END_SECONDS
        for agent in self._agents.values():
            agent.stop()
        for agent in self._agents.values():
            agent.join(max(0.0, deadline - time.monotonic()))
        self.progress.flush(now=True)


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
