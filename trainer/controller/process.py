"""The controller's process: starts the agents that it holds leases for, and stops them at a signal."""

from __future__ import annotations

import logging
import os
import queue
import signal
import time
from collections.abc import Callable, Mapping
from types import FrameType

from ratchet.store.coordination import ALL_KINDS, AgentActivity, has_grown
from ratchet.store.errors import StoreError, StoreUnavailable
from ratchet.store.store import Store, open_store
from ratchet.trainer.controller.agent_leases import AgentLeases
from ratchet.trainer.controller.agent_runner import AgentCondition, AgentRunner, SharedByAgents
from ratchet.trainer.controller.learner_work import LearnerFactory
from ratchet.trainer.controller.look_pacing import LookPacing
from ratchet.trainer.controller.outages import OutageLog
from ratchet.trainer.errors import TrainerError
from ratchet.trainer.observability.metrics import MetricsRegistry
from ratchet.trainer.observability.monitors import check_installed
from ratchet.trainer.observability.progress import StoredProgress
from ratchet.trainer.release.evaluation import MakeWorkflowEvaluator
from ratchet.trainer.settings.trainer_settings import TrainerSettings

# ControllerProcess: one process that serves any number of agents, and in which nothing waits.
#
# One thread steps the agents whose turn it is: those that something has happened to (a verdict, the end of a round, a
# lease), and each now and then. One query for all agents tells what others did in the store (`store.activity`). Agents
# come and go with `set_agents`; `agent_runner.py` is the life of one. The process ends only for what concerns all
# agents: a store that cannot be used, or agents none of which can be started.

log = logging.getLogger(__name__)

_MAX_JUDGE_THREADS = 256  # of all agents; each agent has its share of them for itself
_MAX_PAUSE_SECONDS = 10.0
_STOP_SECONDS = 30.0  # for all agents at the end

Agents = Mapping[str, TrainerSettings]


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
        self._store = store
        self._poll_seconds = first.poll_interval_seconds
        self._pacing = LookPacing(self._poll_seconds)
        self._wanted = dict(agents)
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()  # its put may be called by a signal handler
        self._stopping = False
        self.metrics = MetricsRegistry(store)
        if first.metrics_port is not None:
            self.metrics.serve(first.metrics_host, first.metrics_port)
        self._leases = AgentLeases(store, first.lease_seconds, self._wake_all)
        self._progress = StoredProgress(store)
        self._shared = SharedByAgents(
            store,
            self._leases,
            self.metrics,
            self._progress,
            learner_factory,
            make_workflow_evaluator,
            upstream_key,
            max_judge_threads=lambda: max(2, _MAX_JUDGE_THREADS // max(1, len(self._wanted))),
        )
        self._runners: dict[str, AgentRunner] = {}
        self._activity: dict[str, AgentActivity] = {}
        self._look_at = 0.0  # monotonic
        self._outages = OutageLog()
        self._has_run = False

    @property
    def conditions(self) -> dict[str, AgentCondition]:
        """The agents of this process, each with where it is in its life."""
        return {alias: runner.condition for alias, runner in dict(self._runners).items()}

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
        """Serve the agents until `stop`. Raises StoreError, and TrainerError if no agent can be started."""
        try:
            while not self._stopping:
                self._arrange()
                now = time.time()
                self._look()
                for runner in tuple(self._runners.values()):
                    if runner.is_due(now):
                        runner.turn(now)
                self._share_agents()
                self._check_starts()
                self._progress.flush()
                self._pause(self._next_due(now))
        finally:
            self._close()

    def _arrange(self) -> None:
        """Start and stop agents as `set_agents` wants."""
        wanted = self._wanted
        for alias, runner in tuple(self._runners.items()):
            if runner.condition is AgentCondition.STOPPED:
                del self._runners[alias]
            elif wanted.get(alias) != runner.settings:
                runner.remove()
        for alias, settings in wanted.items():
            if alias not in self._runners:
                self._runners[alias] = AgentRunner(settings, self._shared, self.wake)

    def _share_agents(self) -> None:
        """Give up agents that other controllers should take, between their works."""
        giving = sum(runner.gives_up for runner in self._runners.values())
        for runner in self._runners.values():
            if giving < self._leases.surplus and not runner.gives_up and runner.can_give_up:
                runner.give_up()
                giving += 1

    def _look(self) -> None:
        """Let the agents look that something has happened to in the store."""
        running = [runner for runner in self._runners.values() if runner.is_running]
        started = time.monotonic()
        if not running or started < self._look_at:
            return
        idle_seconds = min(runner.settings.seal_after_idle_seconds for runner in running)
        pause = self._poll_seconds
        try:
            activity = self._store.activity.read(idle_seconds)
        except StoreUnavailable as outage:
            self._outages.record(outage, time.time(), "looking for work")
            activity = {runner.alias: dict.fromkeys(ALL_KINDS, 0) for runner in running}  # anything may wait
        else:
            self._outages.end(time.time())
            pause = self._pacing.pause_after(time.monotonic() - started)
        self._look_at = time.monotonic() + pause
        for runner in running:
            before, after = self._activity.get(runner.alias, {}), activity.get(runner.alias, {})
            runner.look(changed=has_grown(before, after), waiting=frozenset(after))
        self._activity = activity

    def _check_starts(self) -> None:
        """Raise the error of an agent's start if all have failed to start and none has ever run."""
        self._has_run = self._has_run or any(runner.has_run for runner in self._runners.values())
        errors = [runner.start_error for runner in self._runners.values()]
        if not self._has_run and errors and (error := errors[0]) is not None and None not in errors:
            raise error

    def _next_due(self, now: float) -> float:
        """Return the seconds until something is due."""
        due = min((runner.due_at for runner in self._runners.values()), default=now + _MAX_PAUSE_SECONDS) - now
        if any(runner.is_running for runner in self._runners.values()):
            due = min(due, self._look_at - time.monotonic())
        if (flush_in := self._progress.due_in) is not None:
            due = min(due, flush_in)
        return max(0.0, due)

    def _pause(self, seconds: float) -> None:
        """Wait until somebody wakes us, at most that long."""
        try:
            self._wakes.get(timeout=seconds)
            while True:
                self._wakes.get_nowait()
        except queue.Empty:
            pass

    def _wake_all(self) -> None:
        for runner in tuple(self._runners.values()):
            runner.due_at = 0.0
        self.wake()

    def _close(self) -> None:
        """Stop all agents, and give their leases back."""
        for runner in self._runners.values():
            runner.remove()
        deadline = time.monotonic() + _STOP_SECONDS
        while any(runner.condition is not AgentCondition.STOPPED for runner in self._runners.values()):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            for runner in self._runners.values():
                if runner.condition is not AgentCondition.STOPPED:
                    runner.turn(time.time())
            if any(runner.condition is not AgentCondition.STOPPED for runner in self._runners.values()):
                self._pause(min(left, self._poll_seconds))
        self._progress.flush(now=True)
        self._leases.close()


# The controller's process: signals, the store, the agents. Imports no torch; the learner is passed in.
#
# Promises: only one trainer of an agent works at a time, the others wait; SIGTERM and SIGINT end it with exit code 0;
# an error that concerns all agents and that waiting cannot fix ends it with 1 and one log line with the reason.


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
