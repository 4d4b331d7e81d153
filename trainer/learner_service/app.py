"""The HTTP application of the learner service; trainer/learner_api.py describes its paths and answers.

`/health` and `/metrics` are open, everything else needs the bearer token, if there is one. The application waits for
operations and never computes: one thread does that.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import AsyncIterator, Callable
from typing import Any, get_args

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from ratchet import __version__
from ratchet.trainer.errors import LearnerServiceError, LearnerUnreachable, TrainerError
from ratchet.trainer.learner_api import (
    ALIVE_SECONDS,
    MAX_AGENT_CHARS,
    MSGPACK,
    AgentStatus,
    Alive,
    Answer,
    Frame,
    LearnerStatus,
    OpenRequest,
    QueuePosition,
    Refusal,
    RowsDone,
    Verb,
    encode_frame,
)
from ratchet.trainer.learner_service.compute_thread import ComputeThread, Operation, Run
from ratchet.trainer.learner_service.metrics import LearnerMetrics
from ratchet.trainer.learner_service.operations import AgentOperations, AgentSessions, OnRows, decode_request

_POLL_SECONDS = 0.5  # between two looks at the progress of an operation
_HELD_BODIES = 4  # bodies of the largest size that are held at a time
_VERBS = frozenset(get_args(Verb)) - {"open"}
_REFUSED, _UNREACHABLE = LearnerServiceError.__name__, LearnerUnreachable.__name__
_ERROR_OF_STATUS = {409: _UNREACHABLE, 503: _UNREACHABLE}


class LearnerApp:
    """The endpoints over one compute thread. `status` returns the learner without its agents."""

    def __init__(
        self,
        thread: ComputeThread,
        sessions: AgentSessions,
        metrics: LearnerMetrics,
        status: Callable[[], LearnerStatus],
        token: str | None,
        max_body_bytes: int,
    ) -> None:
        self._thread = thread
        self._sessions = sessions
        self._metrics = metrics
        self._status = status
        self._token = token.encode() if token else None
        self._max_body_bytes = max_body_bytes
        self._held_bytes = 0
        self.asgi = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/metrics", self._metrics_page),
                Route("/v1/status", self._status_page),
                Route("/v1/open", self._open, methods=["POST"]),
                Route("/v1/sessions/{session}/{verb}", self._session_verb, methods=["POST"]),
            ],
            exception_handlers={HTTPException: _refusal, TrainerError: _refusal_of_error},
        )
        self.asgi.router.redirect_slashes = False

    async def _health(self, _: Request) -> Response:
        ready = self._thread.ready
        return _json({"state": "ready" if ready else "loading"}, 200 if ready else 503)

    async def _metrics_page(self, _: Request) -> Response:
        return Response(self._metrics.page(self._thread), media_type="text/plain; version=0.0.4")

    async def _status_page(self, request: Request) -> Response:
        self._check_token(request)
        agents = tuple(
            AgentStatus(one.agent, one.step, one.share, self._thread.waiting_of(one.agent), one.seconds)
            for one in self._sessions.all()
        )
        running = self._thread.running
        text = f"{running.agent} {running.verb}" if running else None
        return _json(msgspec.structs.replace(self._status(), agents=agents, running=text))

    async def _open(self, request: Request) -> Response:
        self._check_token(request)
        async with self._held_body(request) as body:
            wanted = decode_request(body, OpenRequest)
        self._check_open(wanted)
        self._thread.set_share(wanted.agent, wanted.share)
        return self._answer(wanted.agent, "open", lambda operations, _: operations.open(wanted))

    async def _session_verb(self, request: Request) -> Response:
        self._check_token(request)
        verb: Any = request.path_params["verb"]
        if verb not in _VERBS:
            raise HTTPException(404, f"the learner has no verb {verb!r}")
        try:
            session = self._sessions.get(request.path_params["session"])
        except LearnerUnreachable as unknown:
            raise HTTPException(409, str(unknown)) from unknown
        async with contextlib.AsyncExitStack() as held:
            body = await held.enter_async_context(self._held_body(request))

            def run(operations: AgentOperations, on_rows: OnRows) -> Answer:
                return operations.run(verb, session.id, body, on_rows)

            return self._answer(session.agent, verb, run, held)

    def _check_token(self, request: Request) -> None:
        given = request.headers.get("authorization", "").encode()
        if self._token is not None and not hmac.compare_digest(given, b"Bearer " + self._token):
            raise HTTPException(401, "the token is missing or wrong: set RATCHET_LEARNER_TOKEN to the learner's")

    def _check_open(self, wanted: OpenRequest) -> None:
        """Raise LearnerServiceError if this learner cannot train for the controller."""
        status = self._status()
        if wanted.version != __version__:
            raise LearnerServiceError(
                f"the learner runs Ratchet {__version__}, the controller {wanted.version}: install the same version"
            )
        known = status.base_model_digests
        parts = sorted(
            part for part in known.keys() & wanted.base_model.keys() if known[part] != wanted.base_model[part]
        )
        if parts:
            raise LearnerServiceError(
                f"the learner trains another base model ({status.base_model}): {', '.join(parts)} differ; start it "
                "with the controller's base_model"
            )
        if not wanted.agent or len(wanted.agent) > MAX_AGENT_CHARS or not 0 < wanted.share < float("inf"):
            raise LearnerServiceError(f"agent {wanted.agent!r} with share {wanted.share} cannot be opened")

    @contextlib.asynccontextmanager
    async def _held_body(self, request: Request) -> AsyncIterator[bytes]:
        """Read a body and hold its memory for the block. Raises HTTPException if it is too large."""
        length = int(request.headers.get("content-length") or self._max_body_bytes + 1)
        if length > self._max_body_bytes:
            raise HTTPException(
                413, f"a request of {length} bytes is larger than the learner's limit of {self._max_body_bytes} "
                "(learner.max_body_mb): train smaller rounds, or raise the limit"
            )  # fmt: skip
        if self._held_bytes + length > _HELD_BODIES * self._max_body_bytes:
            raise HTTPException(503, "too many large requests wait for the learner")
        self._held_bytes += length
        try:
            yield await request.body()
        finally:
            self._held_bytes -= length

    def _answer(
        self, agent: str, verb: Verb, run: Run, held: contextlib.AsyncExitStack | None = None
    ) -> StreamingResponse:
        """Submit an operation; return the stream of its frames, which takes over what is `held` for the operation."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended: the process stops
                loop.call_soon_threadsafe(changed.set)

        operation = Operation(agent, verb, run, wake)
        try:
            self._thread.submit(operation)
        except LearnerUnreachable as busy:
            raise HTTPException(503, str(busy)) from busy
        frames = self._frames(operation, changed, (held or contextlib.AsyncExitStack()).pop_all())
        return StreamingResponse(frames, media_type=MSGPACK)

    async def _frames(
        self, operation: Operation, changed: asyncio.Event, held: contextlib.AsyncExitStack
    ) -> AsyncIterator[bytes]:
        async with held:
            try:
                async for frame in self._progress(operation, changed):
                    yield encode_frame(frame)
            finally:
                if operation.answer is None:
                    self._thread.abandon(operation)

    async def _progress(self, operation: Operation, changed: asyncio.Event) -> AsyncIterator[Frame]:
        """Yield what changes, and a sign of life where nothing does."""
        ahead, rows, quiet = -1, 0, 0.0
        while operation.answer is None:
            frame: Frame | None = None
            if (now_ahead := self._thread.ahead_of(operation)) != ahead:
                ahead, frame = now_ahead, QueuePosition(now_ahead)
            elif operation.rows != rows:
                rows, frame = operation.rows, RowsDone(operation.rows)
            elif quiet >= ALIVE_SECONDS:
                frame = Alive()
            quiet = quiet + _POLL_SECONDS if frame is None else 0.0
            if frame is not None:
                yield frame
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), _POLL_SECONDS)
            changed.clear()
        yield operation.answer


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def _refusal(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    name = _ERROR_OF_STATUS.get(error.status_code, _REFUSED)
    return _json(Refusal(name, error.detail), error.status_code)


async def _refusal_of_error(_: Request, error: Exception) -> Response:
    return _json(Refusal(type(error).__name__, str(error)), 400)
