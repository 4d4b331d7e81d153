"""Admission in a worker of several: the coordinator places every call, and learns of every end.

Promises:
- A call is placed by one message and its answer; a second one carries the messages if the path of the last answer does
  not decide.
- The last byte of an answer waits until the coordinator has the call's end, side by side with the journal: a call that
  follows never overtakes it. If the connection is lost, it waits until the coordinator has noticed that too, unless its
  process is gone. An end that it does not have is delivered later.
- While the coordinator is away, calls are served (`cautious_linker.py`): from `_PATIENCE_SECONDS` after the loss on if
  its process is gone, because another one starts, else from when it has noticed the loss too (`unheard_workers.py`);
  if there are several coordinators, `_STANDBY_SECONDS` after the loss.
  When it is back, it learns what this worker placed, and what ended before: the last `_MAX_RECENT` calls.
- A worker that is started again while the coordinator is away knows what the store has, its own journal included.
- A call that was abandoned while it waited for its place is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from itertools import count

import msgspec

from ratchet.proxy.coordinator.admission import Admission
from ratchet.proxy.coordinator.conversations.token_contexts import TokenContexts
from ratchet.proxy.coordinator.linking.cautious_linker import CautiousLinker
from ratchet.proxy.coordinator.unheard_workers import ALONE_SECONDS
from ratchet.proxy.coordinator.versions.policy_cache import PolicyCache
from ratchet.proxy.errors import BadRequest, ProxyError
from ratchet.proxy.messages.admission_records import AdmissionRequest, EndedCall
from ratchet.proxy.messages.coordinator_messages import (
    Answer,
    CaughtUp,
    End,
    Find,
    MarkUnanswered,
    MessagesWanted,
    Placed,
    PlacementRefused,
    to_error,
)
from ratchet.proxy.messages.link_records import Leaf, Placement
from ratchet.proxy.runtime.critical_tasks import CriticalTasks
from ratchet.proxy.telemetry.metrics import ProxyMetrics
from ratchet.proxy.worker.coordination.limit_reports import LimitReports
from ratchet.proxy.worker.coordination.message_batches import MessageBatches
from ratchet.store.content import messages as canon
from ratchet.store.ids import is_planned
from ratchet.store.records import CallEnded, CallStarted, family_of

log = logging.getLogger("ratchet.proxy")

_LATE_SECONDS = 0.25  # an end that the coordinator has later counts as late
_MAX_RECENT = 2_000  # ended calls that the coordinator may have lost
_PATIENCE_SECONDS = 5.0  # that a call waits for a coordinator whose process is gone: longer than it takes to start
_STANDBY_SECONDS = 15.0  # the same for another coordinator: its lease, and its wait for the workers that are missing
_CHECK_SECONDS = 1.0  # between two looks whether it is there
_RETRY_SECONDS = 0.1  # between greetings while the coordinator is away
_START_SECONDS = 60.0

LocalAdmission = Callable[[CautiousLinker], Admission]


class RemoteAdmission:
    """The service. `make_linker` and `make_admission` build what places calls while the coordinator is away.

    `restore` reads in the store what a worker that is started again serves with until a coordinator answers; None for
    one that is started for the first time, which waits for the coordinator.
    """

    def __init__(
        self,
        coordinators: Sequence[str],
        token: str,
        worker: str,
        policies: PolicyCache,
        contexts: TokenContexts | None,
        metrics: ProxyMetrics,
        make_linker: Callable[[], CautiousLinker],
        make_admission: LocalAdmission,
        limits: LimitReports,
        is_behind: Callable[[], bool],
        restore: Callable[[CautiousLinker], Awaitable[bool]] | None,
        critical_tasks: CriticalTasks,
    ) -> None:
        self._restore = restore
        self._batches = MessageBatches(coordinators, token, worker, self._on_lost)
        self._policies = policies
        self._contexts = contexts
        self._metrics = metrics
        self._make_linker = make_linker
        self._make_admission = make_admission
        self._limits = limits
        self._is_behind = is_behind
        self._was_behind = False  # when the session began
        self._critical_tasks = critical_tasks
        self._numbers = count(1)
        self._open: dict[int, Placement] = {}
        self._recent: deque[EndedCall] = deque(maxlen=_MAX_RECENT)
        self._is_connected = False
        self._alone_at = 0.0  # when calls no longer wait for the coordinator; seconds of the event loop's clock
        self._is_gone = False  # the process of the coordinator that was lost
        self._connected = asyncio.Event()
        self._linker: CautiousLinker | None = None  # while the coordinator is away
        self._syncing: asyncio.Event | None = None  # set when the coordinator knows this worker's calls
        self._lost = asyncio.Event()
        self._waits: set[asyncio.Task[None]] = set()  # of last bytes
        self._task: asyncio.Task[None] | None = None
        metrics.coordinator_up.set_function(lambda: self._is_connected)

    async def start(self) -> None:
        """Begin the session. Raises ProxyError if the coordinator does not answer to a worker that has not served."""
        patience = _START_SECONDS if self._restore is None else ALONE_SECONDS
        try:
            async with asyncio.timeout(patience):
                await self._connect()
        except TimeoutError:
            if self._restore is None:
                raise ProxyError(
                    f"the coordinator did not answer within {_START_SECONDS:g} s: {self._batches.refusal}"
                ) from None
            self._linker = self._make_linker()
            await self._restore(self._linker)
            self._lost.set()
            log.warning("event=serving_alone trajectories=%d reason=%r", len(self._linker), self._batches.refusal)
        self._task = self._critical_tasks.start_task(self._reconnect(), "coordinator")

    @property
    def coordinator_url(self) -> str:
        """The coordinator that this worker asks, or asked last."""
        return self._batches.url

    async def stop(self) -> None:
        """Deliver what is under way, and end the session."""
        if self._task is not None:
            await self._critical_tasks.stop_tasks(self._task)
        self._limits.disconnect()
        await self._batches.close()

    # --- CallAdmission ----------------------------------------------------------------------------------------

    async def resolve(self, request: AdmissionRequest) -> Placement:
        """Return the placement of a call; each needs one `end_call`. Raises ProxyError."""
        placement: Placement | None = None
        while placement is None:
            if not self._is_connected:
                await self._wait_for_connection()
            place = self._find if self._is_connected else self._find_alone
            placement = await place(next(self._numbers), request)
        self._open[placement.number] = placement
        return placement

    def end_call(
        self, placement: Placement, record: CallEnded | None, leaves: Sequence[Leaf], now: float, *, retryable: bool
    ) -> asyncio.Future[bool] | None:
        """Close a call; return the future of the coordinator's confirmation, which is not late."""
        linker = None if self._is_connected else self._outage_linker()
        if self._contexts is not None and record is not None:
            self._contexts.add_answers(record)
        self._open.pop(placement.number, None)
        self._recent.append(EndedCall(placement, tuple(leaves), now, retryable))
        if linker is not None:
            linker.end_call(placement.link, leaves, now)
            if retryable:
                linker.add_unanswered(placement.link, placement.attempt, now)
            return self._noticed(asyncio.get_running_loop().create_future())
        return self._confirmed(self._batches.ask(End(placement.number, tuple(leaves), now, retryable)))

    def mark_unanswered(self, placement: Placement) -> None:
        """Record that the answer of an ended call did not reach its client, which may retry."""
        now = time.time()
        if self._is_connected:
            self._batches.ask(MarkUnanswered(placement.link, placement.attempt, now))
        else:
            self._outage_linker().add_unanswered(placement.link, placement.attempt, now)

    def task_family(self, placement: Placement, start: CallStarted) -> str:
        """Return the task family of a call's trajectory."""
        return placement.family or family_of(start.task, start.tools_hash)

    # --- the coordinator answers ------------------------------------------------------------------------------

    async def _find(self, number: int, request: AdmissionRequest) -> Placement | None:
        """Return the coordinator's placement; None if it went away. Raises ProxyError."""
        epoch = self._batches.epoch
        alone = "@" in request.model or is_planned(request.identity.trajectory)
        answer = await self._ask(number, _partial(request), alone)
        if isinstance(answer, MessagesWanted):
            answer = await self._ask(number, _whole(request), alone)
        if isinstance(answer, PlacementRefused):
            raise to_error(answer)
        if not isinstance(answer, Placed) or epoch != self._batches.epoch:  # a greeting since then did not report it
            return None
        placement = answer.placement
        if not self._policies.has_version(placement.alias, placement.version):
            try:
                await self._policies.refresh_if_unknown(f"{placement.alias}@{placement.version}")
            except asyncio.CancelledError:
                self._close(number)
                raise
        return placement

    async def _ask(self, number: int, request: AdmissionRequest, alone: bool) -> Answer | None:
        try:
            future = self._batches.ask(Find(number, request), alone=alone)
        except OverflowError as error:
            raise BadRequest(f"the messages have an integer of more than 64 bits: {error}") from error
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:  # the client left
            future.add_done_callback(lambda done: self._close(number) if isinstance(done.result(), Placed) else None)
            raise

    def _close(self, number: int) -> None:
        """Close a call that was placed but never began."""
        if self._is_connected:
            self._batches.ask(End(number, (), time.time(), retryable=True))

    def _confirmed(self, answer: asyncio.Future[Answer | None]) -> asyncio.Future[bool]:
        """Return a future that is done when the answer is there, or late."""
        loop = asyncio.get_running_loop()
        confirmed: asyncio.Future[bool] = loop.create_future()
        late_at = loop.time() + _LATE_SECONDS

        def on_answer(done: asyncio.Future[Answer | None]) -> None:
            if loop.time() > late_at:
                self._metrics.late_ends.inc()
            if done.result() is None:
                self._noticed(confirmed)
            else:
                _finish(confirmed, True)

        answer.add_done_callback(on_answer)
        return confirmed

    def _noticed(self, confirmed: asyncio.Future[bool]) -> asyncio.Future[bool]:
        """Return the future, done once the coordinator is connected again, has noticed the loss too, or is gone.

        While the session begins again, it is done when the coordinator has every end: with the second greeting it
        assumes to know all that this worker serves.
        """
        loop = asyncio.get_running_loop()
        if self._syncing is None and (self._is_connected or self._is_gone or self._alone_at <= loop.time()):
            _finish(confirmed, False)
        else:
            task = loop.create_task(self._wait_for_connection())
            self._waits.add(task)
            task.add_done_callback(self._waits.discard)
            task.add_done_callback(lambda _: _finish(confirmed, False))
        return confirmed

    # --- the coordinator is away ------------------------------------------------------------------------------

    def _on_lost(self, reason: str, is_gone: bool) -> None:
        if self._is_connected:
            log.warning("event=coordinator_lost reason=%r", reason)
            self._is_connected = False
            self._limits.disconnect()
            self._is_gone = is_gone
            now = asyncio.get_running_loop().time()
            # One that is not gone may decide on other workers' calls until it notices.
            self._alone_at = now + _PATIENCE_SECONDS if is_gone else self._batches.answered_at + ALONE_SECONDS
            if self._batches.has_standby:
                self._alone_at = max(self._alone_at, now + _STANDBY_SECONDS)
            self._connected.clear()
            self._lost.set()

    async def _wait_for_connection(self) -> None:
        """Wait while the connection is established, or was lost a moment ago."""
        left = self._alone_at - asyncio.get_running_loop().time()
        if left > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._connected.wait(), left)
        if self._syncing is not None:
            await self._syncing.wait()

    async def _find_alone(self, number: int, request: AdmissionRequest) -> Placement | None:
        """Return this worker's own placement; None if the coordinator came back meanwhile. Raises ProxyError."""
        linker = self._outage_linker()
        placement = await self._make_admission(linker).resolve(request)
        if linker is self._linker and self._syncing is None:
            return msgspec.structs.replace(placement, number=number)
        linker.end_call(placement.link, (), time.time())  # the last greeting did not report it
        return None

    def _outage_linker(self) -> CautiousLinker:
        """Return the linker of this outage; at its first call, it learns what this worker knows."""
        if self._linker is None:
            self._linker = self._make_linker()
            for ended in self._recent:
                self._linker.end_call(self._linker.adopt_call(ended.placement), ended.leaves, ended.ended_at)
            for placement in self._open.values():
                self._linker.adopt_call(placement)
        return self._linker

    async def _reconnect(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._lost.wait(), _CHECK_SECONDS)
            if self._is_connected:
                await self._batches.check()
            if not self._is_connected:
                await self._connect()
            elif self._was_behind and not self._is_behind():
                self._was_behind = await self._batches.ask(CaughtUp()) is None

    async def _connect(self) -> None:
        """Begin or continue the session, and tell the coordinator of the calls that it does not know."""
        self._lost.clear()
        self._was_behind = self._is_behind()
        while not await self._greet():
            await asyncio.sleep(_RETRY_SECONDS)
        self._syncing = asyncio.Event()  # no call begins until the coordinator also knows those of the meantime
        try:
            known = self._recent[-1] if self._recent else None
            self._is_connected = await self._greet()
            if self._is_connected:
                self._connected.set()
                self._limits.connect(self._batches.ask)
                self._linker = None
                await asyncio.gather(*self._send_ends(known))
                log.info("event=coordinator_connected open_calls=%d", len(self._open))
            else:
                self._lost.set()
        finally:
            self._syncing.set()
            self._syncing = None

    async def _greet(self) -> bool:
        return await self._batches.greet(self._open.values(), self._recent, is_behind=self._was_behind)

    def _send_ends(self, last: EndedCall | None) -> list[asyncio.Future[Answer | None]]:
        """Send the ends since the call `last`, the latest that the coordinator knows; return their answers."""
        later = []
        for ended in reversed(self._recent):
            if ended is last:
                break
            later.append(ended)
        return [
            self._batches.ask(End(ended.placement.number, ended.leaves, ended.ended_at, ended.retryable))
            for ended in reversed(later)
        ]


def _finish(confirmed: asyncio.Future[bool], is_known: bool) -> None:
    if not confirmed.done():
        confirmed.set_result(is_known)


def _partial(request: AdmissionRequest) -> AdmissionRequest:
    """Return a request with its last assistant message only, and of that its tool-call ids; as it is without one."""
    for place in range(len(request.messages) - 1, -1, -1):
        message = request.messages[place]
        if message.get("role") == "assistant" and place < len(request.keys):
            answer = {"role": "assistant", "tool_calls": [{"id": name} for name in canon.tool_call_ids(message)]}
            key = request.keys[place]
            return msgspec.structs.replace(
                request, messages=(answer,), keys=(key,), answer_digests=b"", is_partial=True
            )
    return _whole(request)


def _whole(request: AdmissionRequest) -> AdmissionRequest:
    """Return a request with all of its messages, as a list that can be encoded."""
    return msgspec.structs.replace(request, messages=[*request.messages])
