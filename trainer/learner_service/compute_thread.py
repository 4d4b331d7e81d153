"""ComputeThread: the one thread that uses the learner's host, and the operations that wait for it.

Promises: an operation runs whole or, if its client left before its turn, not at all; one that runs when its client
leaves runs to its end, because the processes of a group must stay together. The host is created in the thread. An error
that is not a TrainerError, or a lost training process, ends the learner: its state is unknown.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ratchet.trainer.errors import LearnerUnreachable, TrainerError, WorkerProcessLost
from ratchet.trainer.learner_api import Answer, Verb
from ratchet.trainer.learner_service.fair_queue import FairQueue

if TYPE_CHECKING:
    from ratchet.trainer.learner_service.operations import AgentOperations

log = logging.getLogger(__name__)

MAX_WAITING = 256  # operations of all agents
Run = Callable[["AgentOperations", Callable[[int], None]], Answer]


class Operation:
    """One operation of an agent. `on_change` is called in the compute thread when it begins and ends."""

    def __init__(self, agent: str, verb: Verb, run: Run, on_change: Callable[[], None]) -> None:
        self.agent = agent
        self.verb = verb
        self.run = run
        self.rows = 0
        self.running = False
        self.answer: Answer | None = None
        self._on_change = on_change

    def start(self) -> None:
        self.running = True
        self._on_change()

    def add_rows(self, rows: int) -> None:
        self.rows += rows

    def finish(self, answer: Answer) -> None:
        self.answer = answer
        self._on_change()


class ComputeThread:
    """Runs operations one at a time, in the order of the fair queue.

    `make_operations` loads the base model. `on_end` is called in the thread when it ends: with None after `stop`, else
    with the error. `on_done` gets each operation that ran, with its seconds.
    """

    def __init__(
        self,
        make_operations: Callable[[], AgentOperations],
        on_end: Callable[[BaseException | None], None] = lambda error: None,
        on_done: Callable[[Operation, float], None] = lambda operation, seconds: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make_operations = make_operations
        self._on_end = on_end
        self._on_done = on_done
        self._clock = clock
        self._queue: FairQueue[Operation] = FairQueue()
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name="compute", daemon=True)
        self.ready = False
        self.running: Operation | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """Begin no further operation; return whether the running one ended within `timeout` seconds."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def submit(self, operation: Operation) -> None:
        """Add an operation. Raises LearnerUnreachable if it cannot wait here."""
        with self._changed:
            if not self.ready:
                raise LearnerUnreachable("the learner is loading its base model")
            if self._stopping:
                raise LearnerUnreachable("the learner is stopping")
            if len(self._queue) >= MAX_WAITING:
                raise LearnerUnreachable(f"{MAX_WAITING} operations wait for the learner already")
            self._queue.push(operation.agent, operation, is_round=operation.verb == "train")
            self._changed.notify_all()

    def abandon(self, operation: Operation) -> None:
        """Drop an operation whose client has left, if it has not begun."""
        with self._changed:
            if self._queue.remove(operation.agent, operation):
                log.info("event=operation_dropped agent=%s verb=%s", operation.agent, operation.verb)

    def set_share(self, agent: str, share: float) -> None:
        with self._changed:
            self._queue.set_share(agent, share)

    def ahead_of(self, operation: Operation) -> int:
        """Return how many operations wait or run besides this one; 0 if it runs."""
        with self._changed:
            return 0 if operation.running else len(self._queue) - 1 + (self.running is not None)

    def waiting_of(self, agent: str) -> int:
        with self._changed:
            return self._queue.waiting_of(agent)

    def _work(self) -> None:
        error: BaseException | None = None
        try:
            operations = self._make_operations()
            self.ready = True
            while (operation := self._next()) is not None:
                self._execute(operations, operation)
        except BaseException as caught:  # noqa: BLE001 - reported to the main thread, which ends the process
            error = caught
        self.ready = False
        self._on_end(error)

    def _next(self) -> Operation | None:
        """Wait for the next operation; None once the thread must stop."""
        with self._changed:
            while True:
                if self._stopping:
                    return None
                if (found := self._queue.pop()) is not None:
                    self.running = found[1]
                    return found[1]
                self._changed.wait()

    def _execute(self, operations: AgentOperations, operation: Operation) -> None:
        began = self._clock()
        operation.start()
        try:
            answer = operation.run(operations, operation.add_rows)
        except TrainerError as error:
            answer = operations.failure(operation.agent, error)
            about = (operation.agent, operation.verb, answer.error, answer.message)
            log.info("event=operation_failed agent=%s verb=%s error=%s reason=%r", *about)
            if isinstance(error, WorkerProcessLost):
                raise
        finally:
            seconds = self._clock() - began
            with self._changed:
                self._queue.charge(operation.agent, seconds)
                if operation.verb == "close":
                    self._queue.forget(operation.agent)
                self.running = None
        operation.finish(answer)
        self._on_done(operation, seconds)
