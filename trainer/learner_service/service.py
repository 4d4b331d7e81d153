"""The learner as a service: one thread computes, operations take turns in it, and controllers ask over HTTP.

trainer/learner_api.py describes the paths and answers. `/health` and `/metrics` are open, everything else needs the
bearer token, if there is one.

Promises: an operation runs whole or, if its client left before its turn, not at all; one that runs when its client
leaves runs to its end, because the processes of a group must stay together. An error that is not a TrainerError, or a
lost training process, ends the learner: its state is unknown.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ratchet.trainer.errors import LearnerServiceError, LearnerUnreachable, TrainerError, WorkerProcessLost
from ratchet.trainer.learner_api import (
    AgentHost,
    AgentStatus,
    Answer,
    InProgress,
    LearnerStatus,
    OperationRequest,
    Refusal,
    encode,
)
from ratchet.trainer.learner_service.operations import AgentOperations, CheckpointReferences, OpenAgent

log = logging.getLogger(__name__)
start_log = logging.getLogger("ratchet.start")  # logged at any log_level
disable_created_metrics()  # type: ignore[no-untyped-call]  # an additional sample per counter with its creation time

MAX_WAITING = 256  # operations of all agents
MAX_SHORT_IN_A_ROW = 32
MAX_LAG_SECONDS = 300.0
LEFT_SECONDS = 60.0  # without a question, after which the client of an operation has left
_ANSWER_SECONDS = 0.5  # that a question waits for the end of an operation
_LABELS = ["alias", "verb"]


class Operation:
    """One operation of an agent. `on_end` is called in the computing thread."""

    def __init__(
        self, request: OperationRequest, asked_at: float = 0.0, on_end: Callable[[], None] = lambda: None
    ) -> None:
        self.agent, self.verb = request.agent, request.verb
        self.request = request
        self.rows = 0
        self.asked_at = asked_at
        self.answer: Answer | None = None
        self._on_end = on_end

    def add_rows(self, rows: int) -> None:
        self.rows += rows

    def finish(self, answer: Answer) -> None:
        self.request = msgspec.structs.replace(self.request, arguments=msgspec.Raw())  # rows may be large
        self.answer = answer
        self._on_end()


class Turns:
    """Whose operation the learner runs next, by the compute time of the agents, divided by their shares.

    Short operations (open, score, save, close) go before rounds, so a proof or a save never waits for another agent's
    round; but while a round waits, at most MAX_SHORT_IN_A_ROW run before it. Among those of one kind the agent with the
    least time is next. Agents that always have a round waiting thus differ by one round of each at most. An idle agent
    saves up at most MAX_LAG_SECONDS, which it may keep because an agent is idle for moments between its rounds.
    """

    def __init__(self) -> None:
        self.waiting: list[Operation] = []
        self._times: dict[str, float] = {}
        self._newest = 0.0  # the time of the agent that ran last
        self._short_in_a_row = 0  # while a round waited

    def add(self, operation: Operation) -> None:
        agent = operation.agent
        if all(one.agent != agent for one in self.waiting):
            self._times[agent] = max(self._times.get(agent, 0.0), self._newest - MAX_LAG_SECONDS)
        self.waiting.append(operation)

    def next(self) -> Operation | None:
        """Take the next operation; None if none waits. `charge` must follow."""
        rounds = [one for one in self.waiting if one.verb == "train"]
        short = [one for one in self.waiting if one.verb != "train"]
        chosen = rounds if not short or (rounds and self._short_in_a_row >= MAX_SHORT_IN_A_ROW) else short
        if not chosen:
            return None
        self._short_in_a_row = self._short_in_a_row + 1 if rounds and chosen is short else 0
        found = min(chosen, key=lambda one: self._times[one.agent])
        self.waiting.remove(found)
        self._newest = max(self._newest, self._times[found.agent])
        return found

    def charge(self, operation: Operation, seconds: float) -> None:
        """Count the compute time of an operation."""
        self._times[operation.agent] += seconds / operation.request.share


class LearnerMetrics:
    """The metrics of one learner, in their own registry. docs/metrics.md documents every name."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.operations = Counter(
            "ratchet_learner_operations", "Operations by verb and end", [*_LABELS, "state"], registry=registry
        )
        self.seconds = Counter("ratchet_learner_compute_seconds", "Compute time", _LABELS, registry=registry)
        self._waiting = Gauge("ratchet_learner_waiting", "Operations that wait", ["alias"], registry=registry)
        self._ready = Gauge("ratchet_learner_ready", "1 once the base model is loaded", registry=registry)
        self._agents = Gauge("ratchet_learner_agents", "Open agents", registry=registry)

    def page(self, status: LearnerStatus) -> bytes:
        """Return the metrics in Prometheus text format."""
        self._ready.set(status.ready)
        self._agents.set(len(status.agents))
        self._waiting.clear()
        for one in status.agents:
            self._waiting.labels(one.agent).set(one.waiting)
        return generate_latest(self.registry)


class LearnerService:
    """The thread that owns the host, and the operations that wait for it.

    `make_host` loads the base model in the thread. `on_end` is called there when it ends; `error` is then what ended
    it, None after `stop`. `status` is that of a learner without agents.
    """

    def __init__(
        self,
        make_host: Callable[[], AgentHost],
        references: CheckpointReferences,
        status: LearnerStatus,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make_host = make_host
        self._references = references
        self._status = status
        self.clock = clock
        self.metrics = LearnerMetrics()
        self.agents: dict[str, OpenAgent] = {}
        self.on_end: Callable[[], None] = lambda: None
        self.error: BaseException | None = None
        self.ready = False
        self._turns = Turns()
        self._changed = threading.Condition()
        self._stopping = False
        self._running: Operation | None = None
        self._thread = threading.Thread(target=self._work, name="compute", daemon=True)

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
            if len(self._turns.waiting) >= MAX_WAITING:
                raise LearnerUnreachable(f"{MAX_WAITING} operations wait for the learner already")
            self._turns.add(operation)
            self._changed.notify_all()

    def progress(self, operation: Operation) -> InProgress | Answer:
        if operation.answer is not None:
            return operation.answer
        with self._changed:
            ahead = len(self._turns.waiting) - 1 + (self._running is not None)
            return InProgress(0 if operation is self._running else ahead, operation.rows)

    def status(self) -> LearnerStatus:
        with self._changed:
            waiting = [one.agent for one in self._turns.waiting]
            running = self._running
        agents = tuple(
            AgentStatus(one.agent, one.step, one.share, waiting.count(one.agent), one.seconds)
            for one in sorted(self.agents.values(), key=lambda one: one.agent)
        )
        text = f"{running.agent} {running.verb}" if running else None
        return msgspec.structs.replace(self._status, ready=self.ready, agents=agents, running=text)

    def _work(self) -> None:
        try:
            host = self._make_host()
            self._status = msgspec.structs.replace(self._status, limits=host.limits)
            operations = AgentOperations(host, self.agents, self._references, self._status)
            self.ready = True
            known = (self._status.instance, self._status.base_model)
            start_log.info("event=learner_ready instance=%s base_model=%s", *known)
            while (operation := self._next()) is not None:
                self._execute(operations, operation)
            host.end()
        except BaseException as caught:  # noqa: BLE001 - reported to the main thread, which ends the process
            self.error = caught
        self.ready = False
        self.on_end()

    def _next(self) -> Operation | None:
        """Wait for the next operation; None once the thread must stop."""
        with self._changed:
            while not self._stopping:
                found = self._turns.next()
                if found is None:
                    self._changed.wait()
                elif self.clock() - found.asked_at > LEFT_SECONDS:
                    log.info("event=operation_dropped agent=%s verb=%s", found.agent, found.verb)
                    found.finish(Answer("", 0, error=LearnerUnreachable.__name__, message="its client has left"))
                else:
                    self._running = found
                    return found
            return None

    def _execute(self, operations: AgentOperations, operation: Operation) -> None:
        began = self.clock()
        try:
            answer = operations.run(operation.request, operation.add_rows)
        except TrainerError as error:
            answer = operations.failure(operation.agent, error)
            about = (operation.agent, operation.verb, answer.error, answer.message)
            log.info("event=operation_failed agent=%s verb=%s error=%s reason=%r", *about)
            if isinstance(error, WorkerProcessLost):
                raise
        finally:
            seconds = self.clock() - began
            with self._changed:
                self._turns.charge(operation, seconds)
                self._running = None
        labels = (operation.agent, operation.verb)
        self.metrics.operations.labels(*labels, "failed" if answer.error else "done").inc()
        self.metrics.seconds.labels(*labels).inc(seconds)
        if (agent := self.agents.get(operation.agent)) is not None:
            agent.seconds += seconds
        operation.finish(answer)


class LearnerApp:
    """The endpoints of a service; `asgi` is the application."""

    def __init__(self, service: LearnerService, token: str | None, max_body_bytes: int) -> None:
        self._service = service
        self._token = token.encode() if token else None
        self._max_body_bytes = max_body_bytes
        self._operations: dict[str, tuple[Operation, asyncio.Event]] = {}
        self.asgi = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                Route("/v1/status", self._status),
                Route("/v1/operations/{id}", self._submit, methods=["POST"]),
                Route("/v1/operations/{id}", self._ask),
            ],
            exception_handlers={HTTPException: _refused},
        )
        self.asgi.router.redirect_slashes = False

    async def _health(self, _: Request) -> Response:
        ready = self._service.ready
        return _json({"state": "ready" if ready else "loading"}, 200 if ready else 503)

    async def _metrics(self, _: Request) -> Response:
        return Response(self._service.metrics.page(self._service.status()), media_type="text/plain; version=0.0.4")

    async def _status(self, request: Request) -> Response:
        self._check_token(request)
        return _json(self._service.status())

    async def _submit(self, request: Request) -> Response:
        self._check_token(request)
        name, now = request.path_params["id"], self._service.clock()
        for old, (operation, _) in tuple(self._operations.items()):
            if operation.answer is not None and now - operation.asked_at > LEFT_SECONDS:
                del self._operations[old]
        wanted = await self._request(request)
        if name not in self._operations:
            ended, loop = asyncio.Event(), asyncio.get_running_loop()

            def wake() -> None:
                with contextlib.suppress(RuntimeError):  # the loop has ended: the process stops
                    loop.call_soon_threadsafe(ended.set)

            operation = Operation(wanted, now, wake)
            try:
                self._service.submit(operation)
            except LearnerUnreachable as busy:
                raise HTTPException(503, str(busy)) from busy
            self._operations[name] = operation, ended
        return Response(status_code=202)

    async def _request(self, request: Request) -> OperationRequest:
        length = int(request.headers.get("content-length") or self._max_body_bytes + 1)
        if length > self._max_body_bytes:
            raise HTTPException(
                413, f"a request of {length} bytes is larger than the learner's limit of {self._max_body_bytes} "
                "(learner.max_body_mb): train smaller rounds, or raise the limit"
            )  # fmt: skip
        try:
            wanted = msgspec.msgpack.decode(await request.body(), type=OperationRequest)
        except msgspec.MsgspecError as error:
            raise HTTPException(400, f"the learner does not understand the request: {error}") from error
        if not 0 < wanted.share < float("inf"):
            raise HTTPException(400, f"agent {wanted.agent!r} with share {wanted.share} cannot be opened")
        return wanted

    async def _ask(self, request: Request) -> Response:
        self._check_token(request)
        if (known := self._operations.get(request.path_params["id"])) is None:
            raise HTTPException(409, "the learner does not know this operation: it was restarted; its log says why")
        operation, ended = known
        operation.asked_at = self._service.clock()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), _ANSWER_SECONDS)
        if operation.answer is None and not self._service.ready:
            raise HTTPException(503, "it ended before it answered; its log says why")
        return Response(encode(self._service.progress(operation)), media_type="application/msgpack")

    def _check_token(self, request: Request) -> None:
        given = request.headers.get("authorization", "").encode()
        if self._token is not None and not hmac.compare_digest(given, b"Bearer " + self._token):
            raise HTTPException(401, "the token is missing or wrong: set RATCHET_LEARNER_TOKEN to the learner's")


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = LearnerUnreachable if error.status_code in (409, 503) else LearnerServiceError
    return _json(Refusal(kind.__name__, error.detail), error.status_code)
