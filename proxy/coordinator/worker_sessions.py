"""Admission for the workers of one proxy: their calls are placed here, one decision at a time.

A session begins with `Hello`. Until every expected worker has sent it, or `_START_SECONDS` have passed, nothing is
decided: only then is linking restored, from the store, which by then has the journals of earlier processes, and from
what the workers still know. A worker that ends without a word leaves open calls: they become unanswered attempts,
which a retry continues. Belongs to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from ratchet.proxy.coordinator.admission import Admission
from ratchet.proxy.coordinator.linking.linker import MessagesNeeded, TrajectoryLinker
from ratchet.proxy.errors import Forbidden, ProxyError
from ratchet.proxy.messages import coordinator_messages as messages
from ratchet.proxy.messages.admission_records import EndedCall
from ratchet.proxy.messages.link_records import Placement
from ratchet.proxy.messages.text_fingerprints import NO_FINGERPRINTS
from ratchet.proxy.runtime.critical_tasks import CriticalTasks
from ratchet.proxy.wire.asgi import header, read_body, send_bytes
from ratchet.store.ids import new_id

log = logging.getLogger("ratchet.proxy")

_START_SECONDS = 15.0  # for every worker to begin its session: longer than the replay of a journal may delay its start
_MAX_BODY_BYTES = 2**28
_MAX_ENDED = 50_000  # numbers of ended calls that a session remembers
_BINARY = [(b"content-type", b"application/msgpack")]


class _Session:
    """A worker's open calls by number, and the numbers of the ones that ended last."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.epoch = 0
        self.open: dict[int, Placement] = {}
        self.ended: OrderedDict[int, None] = OrderedDict()

    def end(self, number: int) -> Placement | None:
        """Note the end of a call; return its placement, None if it ended before or is unknown."""
        self.ended[number] = None
        if len(self.ended) > _MAX_ENDED:
            self.ended.popitem(last=False)
        return self.open.pop(number, None)


class WorkerSessions:
    """The service, and the ASGI middleware that answers the workers' requests. `token`: what they send as bearer."""

    def __init__(
        self,
        admission: Admission,
        linker: TrajectoryLinker,
        restore: Callable[[], Awaitable[None]],
        token: str,
        workers: int,
        critical_tasks: CriticalTasks,
    ) -> None:
        self._admission = admission
        self._linker = linker
        self._restore = restore
        self._authorization = f"Bearer {token}"
        self._workers = workers
        self._critical_tasks = critical_tasks
        self._boot = new_id("boot")
        self._sessions: dict[str, _Session] = {}  # by worker
        self._hellos: dict[str, messages.Hello] = {}  # by worker, until linking is restored
        self._greeted = asyncio.Event()  # a worker sent `Hello`
        self._restored = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to wait for the workers."""
        self._task = self._critical_tasks.start_task(self._begin(), "sessions")

    async def stop(self) -> None:
        """Stop waiting for the workers."""
        if self._task is not None:
            await self._critical_tasks.stop_tasks(self._task)

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """Return an application that answers the workers' messages, and leaves all other requests to `app`."""

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["path"] != messages.PATH:
                await app(scope, receive, send)
                return
            if not hmac.compare_digest(header(scope, b"authorization") or "", self._authorization):
                raise Forbidden("only the workers of this proxy may send messages to its coordinator")
            response = await self._answer(await read_body(receive, _MAX_BODY_BYTES))
            await send_bytes(send, 200, messages.encode(response), list(_BINARY))

        return answer

    def end_session(self, worker: str) -> None:
        """End the session of a worker that died: its open calls are unanswered attempts."""
        session, now = self._sessions.pop(worker, None), time.time()
        for placement in session.open.values() if session else ():
            self._linker.end_call(placement.link, (), now)
            self._linker.add_unanswered(placement.link, placement.attempt, now)
        if session is not None:
            log.info("event=session_ended worker=%s open_calls=%d", worker, len(session.open))

    async def _begin(self) -> None:
        try:
            async with asyncio.timeout(_START_SECONDS):
                while len(self._hellos) < self._workers:
                    self._greeted.clear()
                    await self._greeted.wait()
        except TimeoutError:
            log.warning("event=workers_missing known=%d expected=%d", len(self._hellos), self._workers)
        await self._restore()
        for hello in self._hellos.values():
            self._adopt(hello)
        self._hellos.clear()
        self._restored.set()
        log.info("event=linking_restored trajectories=%d workers=%d", len(self._linker), len(self._sessions))

    async def _answer(self, body: bytes) -> Any:
        request = messages.decode_request(body)
        if isinstance(request, messages.Hello):
            return await self._welcome(request)
        session = self._sessions.get(request.worker)
        sender = (self._boot, session.name, session.epoch) if session else None
        if session is None or (request.boot, request.session, request.epoch) != sender:
            return messages.Stranger()
        return messages.Answers(tuple([await self._reply(session, message) for message in request.messages]))

    async def _welcome(self, hello: messages.Hello) -> messages.Welcome:
        if self._restored.is_set():
            self._adopt(hello)
        else:
            self._hellos[hello.worker] = hello
            self._greeted.set()
            await self._restored.wait()
        return messages.Welcome(self._boot)

    def _adopt(self, hello: messages.Hello) -> None:
        """Begin a session, or continue it, with the calls that this process does not know."""
        session = self._sessions.get(hello.worker)
        if session is None or session.name != hello.session:
            self.end_session(hello.worker)
            session = self._sessions[hello.worker] = _Session(hello.session)
        if hello.epoch <= session.epoch:
            return  # it arrived late
        session.epoch = hello.epoch
        for ended in hello.ended:
            self._adopt_ended(session, ended)
        for placement in hello.open:
            if placement.number not in session.ended:
                self._adopt_open(session, placement)
        reported = {placement.number for placement in hello.open}
        for number in [number for number in session.open if number not in reported]:
            self._close(session, number)  # its answer did not reach the worker, which placed the call itself

    def _adopt_open(self, session: _Session, placement: Placement) -> None:
        known = session.open.get(placement.number)
        if known is not None and known.link.trajectory_id == placement.link.trajectory_id:
            return
        if known is not None:
            self._linker.end_call(known.link, (), time.time())
        link = self._linker.adopt_call(placement)
        session.open[placement.number] = msgspec.structs.replace(placement, link=link)

    def _adopt_ended(self, session: _Session, ended: EndedCall) -> None:
        number = ended.placement.number
        if number in session.ended:
            return
        self._adopt_open(session, ended.placement)
        leaves = [leaf for leaf in ended.leaves if not self._linker.has_answer(leaf)]
        self._end(session, messages.End(number, tuple(leaves), ended.ended_at, ended.retryable))

    def _close(self, session: _Session, number: int) -> None:
        placement = session.end(number)
        if placement is not None:
            self._linker.end_call(placement.link, (), time.time())

    async def _reply(self, session: _Session, message: messages.Find | messages.End | messages.MarkUnanswered) -> Any:
        if isinstance(message, messages.Find):
            return await self._place(session, message)
        if isinstance(message, messages.End):
            self._end(session, message)
        else:
            self._linker.add_unanswered(message.link, message.attempt, message.at)
        return messages.Noted()

    async def _place(self, session: _Session, message: messages.Find) -> messages.Answer:
        try:
            placement = await self._admission.resolve(message.request)
        except MessagesNeeded:
            return messages.MessagesWanted()
        except ProxyError as error:
            return messages.refused(error)
        session.open[message.number] = placement
        return messages.Placed(self._slim(placement, message))

    def _slim(self, placement: Placement, message: messages.Find) -> Placement:
        """Return what the worker needs of a placement."""
        link, family = placement.link, None
        parent = link.parent
        if parent is not None and parent.fingerprints is not NO_FINGERPRINTS:
            parent = msgspec.structs.replace(parent, fingerprints=NO_FINGERPRINTS)
        if placement.prompt is not None:
            tools_hash = message.request.stored_tools_hash or message.request.tools_hash
            family = self._linker.task_family(link.trajectory_id, placement.task, tools_hash)
        link = msgspec.structs.replace(link, parent=parent, quoted=None)
        return msgspec.structs.replace(placement, link=link, number=message.number, family=family)

    def _end(self, session: _Session, message: messages.End) -> None:
        placement = session.end(message.number)
        if placement is None:
            return
        self._linker.end_call(placement.link, message.leaves, message.ended_at)
        if message.retryable:
            self._linker.add_unanswered(placement.link, placement.attempt, message.ended_at)
