"""Admission for workers, of this machine and others: their calls are placed here, one decision at a time.

A session begins with `Hello`. Until every expected worker has sent it, or its time is over, nothing is decided: only
then is linking restored, from the store, which by then has the journals of earlier processes, and from what the workers
still know. While calls of a worker may be missing, nothing is linked on a guess (`unheard_workers.py`). A worker that
dies leaves open calls: they become unanswered attempts, which a retry continues. The open calls of one that is not
heard of are closed only, since it may still answer them. Belongs to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from ratchet.proxy.coordinator.admission import Admission
from ratchet.proxy.coordinator.coordinator_lease import CoordinatorLease
from ratchet.proxy.coordinator.known_workers import KnownWorkers
from ratchet.proxy.coordinator.limits.sharing import SharedLimits
from ratchet.proxy.coordinator.linking.cautious_linker import CautiousLinker
from ratchet.proxy.coordinator.linking.linker import MessagesNeeded
from ratchet.proxy.coordinator.unheard_workers import TICK_SECONDS, UnheardWorkers
from ratchet.proxy.errors import BadRequest, Forbidden, ProxyError
from ratchet.proxy.messages import coordinator_messages as messages
from ratchet.proxy.messages.admission_records import EndedCall
from ratchet.proxy.messages.link_records import Placement
from ratchet.proxy.messages.text_fingerprints import text_hash
from ratchet.proxy.runtime.critical_tasks import CriticalTasks
from ratchet.proxy.settings import TOKEN_VARIABLE
from ratchet.proxy.wire.asgi import ANSWER_REPEATED, HEADERS_BY_NAME, header, headers_of, read_body, send_bytes
from ratchet.store.ids import new_id

log = logging.getLogger("ratchet.proxy")

_START_SECONDS = 15.0  # for every worker to begin its session: longer than the replay of a journal may delay its start
_OTHERS_SECONDS = 5.0  # for those of other machines, while some have a session to continue, and serve alone
_REPORT_SECONDS = 1.0  # for all of them to report what they have served alone meanwhile; then calls begin
_MAX_BODY_BYTES = 2**28
_MAX_SILENT_SECONDS = 30.0
_RETRY_SECONDS = 1.0  # while the store does not answer
_MAX_ENDED = 5_000  # numbers of ended calls that a session remembers: a worker reports its last 2,000
_OPEN_PATHS = ("/health/live", "/health/ready", "/metrics")  # probes and Prometheus have no token
_AUTHORIZATION, _TOKEN = b"authorization", messages.TOKEN_HEADER.encode()
_BINARY = b"application/msgpack"


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
    """The service, and the ASGI middleware that answers the workers' requests.

    `restore` reads linking from the store, and returns whether that has answered. `token`: what workers prove to be
    workers by. `workers`: the names of this machine's, which begin their session first. `known_workers`: those of other
    machines; None if there are none. `lease`: None if there is no other coordinator.
    """

    def __init__(
        self,
        admission: Admission,
        linker: CautiousLinker,
        restore: Callable[[], Awaitable[bool]],
        token: str,
        workers: Collection[str],
        unheard: UnheardWorkers,
        known_workers: KnownWorkers | None,
        lease: CoordinatorLease | None,
        critical_tasks: CriticalTasks,
    ) -> None:
        self._admission = admission
        self._linker = linker
        linker.doubt = unheard.doubt
        self._unheard = unheard
        self._restore = restore
        self._token = token
        self._workers = frozenset(workers)
        self._known = known_workers
        self._lease = lease
        self._critical_tasks = critical_tasks
        self._boot = new_id("boot")
        self._sessions: dict[str, _Session] = {}  # by worker
        self._limits = SharedLimits()
        self._hellos: dict[str, messages.Hello] = {}  # by worker, until linking is restored
        self._replaced: set[str] = set()  # workers that began another session meanwhile: their journals were read early
        self._greeted = asyncio.Event()  # a worker sent `Hello`
        self._restored = asyncio.Event()
        self._expected: set[str] = set()  # workers that greeted before that, until they do so again
        self._reported = asyncio.Event()  # none is expected any more
        self._returned: set[str] = set()  # workers that were missing: what they served is in the store
        self._catch_up_now = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin to wait for the workers."""
        start = self._critical_tasks.start_task
        self._tasks = [
            start(self._begin(), "sessions"),
            start(self._watch(), "silent workers"),
            start(self._catch_up(), "missing workers"),
        ]

    async def stop(self) -> None:
        """Stop waiting for the workers."""
        await self._critical_tasks.stop_tasks(*self._tasks)

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """Return an application that answers the workers, and leaves what they forward, and probes, to `app`."""

        async def respond(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["path"] in _OPEN_PATHS:
                await app(scope, receive, send)
                return
            own = scope["path"] == messages.PATH
            given = header(scope, _AUTHORIZATION if own else _TOKEN) or ""
            expected = f"Bearer {self._token}" if own else self._token
            if not hmac.compare_digest(given.encode(), expected.encode()):
                raise Forbidden(f"only workers with the coordinator's token ({TOKEN_VARIABLE}) may send it requests")
            if own:
                _, answer = await self._answer_bytes(await read_body(receive, _MAX_BODY_BYTES))
                if repeat := scope.get(ANSWER_REPEATED):
                    repeat(self._answer_bytes)
                await send_bytes(send, 200, answer, [(b"content-type", _BINARY)])
            else:
                await app(_forwarded(scope), receive, send)

        return respond

    def active_workers(self) -> Collection[str]:
        """Return the names of the workers that have a session."""
        return tuple(self._sessions)

    def end_session(self, worker: str) -> None:
        """End the session of a worker that died: its open calls are unanswered attempts."""
        session, now = self._sessions.pop(worker, None), time.time()
        self._limits.forget(worker)
        self._unheard.end(worker)
        for placement in session.open.values() if session else ():
            self._linker.end_call(placement.link, (), now)
            self._linker.add_unanswered(placement.link, placement.attempt, now)
        if session is not None:
            log.info("event=session_ended worker=%s open_calls=%d", worker, len(session.open))

    async def _begin(self) -> None:
        if self._lease is not None:
            await self._lease.acquired.wait()
        others = await self._known.read() if self._known is not None else frozenset[str]()
        started_at = asyncio.get_running_loop().time()
        await self._wait_for(self._workers, started_at + _START_SECONDS)
        are_serving = any(hello.boot for hello in self._hellos.values())  # alone, until something is decided
        await self._wait_for(others, started_at + (_OTHERS_SECONDS if are_serving else _START_SECONDS))
        if missing := sorted((self._workers | others) - self._hellos.keys()):
            log.warning("event=workers_missing known=%d missing=%s", len(self._hellos), ",".join(missing))
            for worker in missing:
                self._unheard.miss(worker)
        while not await self._restore():
            await asyncio.sleep(_RETRY_SECONDS)
        for hello in self._hellos.values():
            self._adopt(hello)
            self._unheard.expect(hello.worker)
            if hello.is_behind or hello.worker in self._replaced:
                self._unheard.miss(hello.worker)
        self._expected = set(self._hellos)
        asyncio.get_running_loop().call_later(_REPORT_SECONDS if self._expected else 0.0, self._reported.set)
        self._hellos.clear()
        self._restored.set()
        log.info("event=linking_restored trajectories=%d workers=%d", len(self._linker), len(self._sessions))

    async def _wait_for(self, workers: Collection[str], until: float) -> None:
        """Wait until these workers have sent `Hello`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                while not self._hellos.keys() >= set(workers):
                    self._greeted.clear()
                    await self._greeted.wait()

    async def _watch(self) -> None:
        """Close the calls of workers that are not heard of. A process that hangs does not count its own silence."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(TICK_SECONDS)
            self._unheard.tick(time.monotonic() - before)
            for worker, session in list(self._sessions.items()):
                if self._unheard.silent_seconds(worker) > _MAX_SILENT_SECONDS:
                    log.warning("event=worker_silent worker=%s open_calls=%d", worker, len(session.open))
                    self._drop(worker, session)
                    self._unheard.end(worker)

    async def _catch_up(self) -> None:
        """Read in the store what workers served unheard, once they are back."""
        while True:
            await self._catch_up_now.wait()
            self._catch_up_now.clear()
            returned = set(self._returned)
            while not await self._restore():
                await asyncio.sleep(_RETRY_SECONDS)
            for worker in returned:
                self._unheard.find(worker)
            self._returned -= returned
            log.info("event=missing_calls_read workers=%s", ",".join(sorted(returned)))

    def _drop(self, worker: str, session: _Session) -> None:
        """End a session; its open calls are closed, but not repeated by a retry."""
        for number in list(session.open):
            self._close(session, number)
        del self._sessions[worker]
        self._limits.forget(worker)

    async def _answer_bytes(self, body: bytes) -> tuple[bytes, bytes]:
        return _BINARY, messages.encode(await self._answer(body))

    async def _answer(self, body: bytes) -> Any:
        try:
            request = messages.decode_request(body)
        except msgspec.DecodeError as error:
            raise BadRequest(f"the message cannot be read; does the worker run the same version? {error}") from error
        if self._lease is not None and not self._lease.is_held:
            return messages.Stranger()
        if isinstance(request, messages.Hello):
            if request.text_hash != text_hash():
                raise BadRequest(
                    f"worker {request.worker} hashes texts differently: give all machines the same {TOKEN_VARIABLE} "
                    "and the same release of Python"
                )
            return await self._welcome(request)
        if isinstance(request, messages.Goodbye):
            return await self._take_leave(request)
        session = self._sessions.get(request.worker)
        sender = (self._boot, session.name, session.epoch) if session else None
        if session is None or (request.boot, request.session, request.epoch) != sender:
            return messages.Stranger()
        if not self._unheard.hear(request.worker, time.monotonic() - request.seen):
            return messages.Stranger()
        answers = [await self._reply(session, request.worker, message) for message in request.messages]
        return messages.Answers(tuple(answers), time.monotonic())

    async def _take_leave(self, message: messages.Goodbye) -> messages.Stranger:
        session = self._sessions.get(message.worker)
        if session is not None and session.name == message.session:
            self._drop(message.worker, session)
            self._unheard.leave(message.worker)
            if self._known is not None:
                await self._known.remove(message.worker)
        return messages.Stranger()

    async def _welcome(self, hello: messages.Hello) -> messages.Welcome:
        if self._known is not None and hello.worker not in self._sessions:
            await self._known.add(hello.worker)
        if self._restored.is_set():
            self._adopt(hello)
            await self._reported.wait()
        else:
            self._keep(hello)
            await self._restored.wait()
        return messages.Welcome(self._boot, time.monotonic())

    def _keep(self, hello: messages.Hello) -> None:
        """Keep a greeting until linking is restored."""
        earlier = self._hellos.get(hello.worker)
        if earlier is not None and earlier.session != hello.session:
            self._replaced.add(hello.worker)
        elif earlier is not None and earlier.epoch > hello.epoch:
            return  # it arrived late
        self._hellos[hello.worker] = hello
        self._greeted.set()

    def _adopt(self, hello: messages.Hello) -> None:
        """Begin a session, or continue it, with the calls that this process does not know."""
        session = self._sessions.get(hello.worker)
        if session is None or session.name != hello.session:
            self.end_session(hello.worker)
            session = self._sessions[hello.worker] = _Session(hello.session)
        if hello.epoch <= session.epoch:
            return  # it arrived late
        session.epoch = hello.epoch
        age = time.monotonic() - hello.seen if hello.boot == self._boot else float("inf")  # of one sent before
        is_recent = self._unheard.hear(hello.worker, age)
        if is_recent:
            self._expected.discard(hello.worker)
            if not self._expected:
                self._reported.set()
        if is_recent and not hello.is_behind:
            self._catch_up_with(hello.worker)
        for ended in hello.ended:
            self._adopt_ended(session, ended)
        for placement in hello.open:
            if placement.number not in session.ended:
                self._adopt_open(session, placement)
        reported = {placement.number for placement in hello.open}
        for number in [number for number in session.open if number not in reported]:
            self._close(session, number)  # its answer did not reach the worker, which placed the call itself

    def _catch_up_with(self, worker: str) -> None:
        """The store has all calls of a worker's earlier processes: read them, if they were missing."""
        if self._unheard.is_missing(worker) and worker not in self._returned:
            self._returned.add(worker)
            self._catch_up_now.set()

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
        leaves = [leaf for leaf in ended.leaves if self._linker.known_answer(leaf) is None]
        self._end(session, messages.End(number, tuple(leaves), ended.ended_at, ended.retryable))

    def _close(self, session: _Session, number: int) -> None:
        placement = session.end(number)
        if placement is not None:
            self._linker.end_call(placement.link, (), time.time())

    async def _reply(self, session: _Session, worker: str, message: messages.Message) -> Any:
        if isinstance(message, messages.Find):
            return await self._place(session, message)
        if isinstance(message, messages.Amounts):
            levels = self._limits.count(worker, message.amounts, time.monotonic())
            return messages.Levels(levels, max(len(self._workers), len(self._sessions)))
        if isinstance(message, messages.End):
            self._end(session, message)
        elif isinstance(message, messages.CaughtUp):
            self._catch_up_with(worker)
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
        if placement.prompt is not None:
            tools_hash = message.request.stored_tools_hash or message.request.tools_hash
            family = self._linker.task_family(link.trajectory_id, placement.task, tools_hash)
        link = msgspec.structs.replace(link, quoted=None)
        return msgspec.structs.replace(placement, link=link, number=message.number, family=family)

    def _end(self, session: _Session, message: messages.End) -> None:
        placement = session.end(message.number)
        if placement is None:
            return
        self._linker.end_call(placement.link, message.leaves, message.ended_at)
        if message.retryable:
            self._linker.add_unanswered(placement.link, placement.attempt, message.ended_at)


def _forwarded(scope: Scope) -> Scope:
    """Return an operator's request as the worker got it: it has checked the host, and names the client."""
    headers = {**headers_of(scope), b"host": b"localhost"}
    del headers[_TOKEN]
    client = headers.pop(b"x-forwarded-for", b"").decode("latin-1")
    return {
        **scope,
        "headers": list(headers.items()),
        HEADERS_BY_NAME: headers,
        "client": (client, 0) if client else None,
    }
