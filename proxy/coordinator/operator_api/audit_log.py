"""Records what operators read and change, for `GET /api/audit` and `ratchet audit`.

    consumes  the requests of the operator API
    produces  entries in the store (store/access/keys.py)
    waits for the store before a change; reads are written together, every two seconds

Promises: a change that happened has its entry, which is in the store before the change begins, or the request gets 503.
Its outcome follows; it stays unknown if the process dies in between. A read is counted within seconds; `kill -9` loses
those of the last two. Equal reads of a quarter of an hour are one entry with a count, so that an open console does not
fill the log. No bodies, no keys and no other values of filters than those that name an agent or a record.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import msgspec
from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from ratchet.proxy.coordinator.keys.key_cache import Caller
from ratchet.proxy.coordinator.operator_api.api_errors import status_of
from ratchet.proxy.runtime.critical_tasks import CriticalTasks
from ratchet.proxy.runtime.thread_pools import run_lookup
from ratchet.proxy.wire.asgi import CALLER, client_address
from ratchet.store.errors import StoreError
from ratchet.store.ids import new_id
from ratchet.store.operation_records import AuditEntry
from ratchet.store.store import Store

log = logging.getLogger("ratchet.proxy")

_FLUSH_SECONDS = 2.0
_MERGE_SECONDS = 900.0
_PRUNE_SECONDS = 3600.0
_MAX_ENTRIES = 10_000  # in memory
_NAMING = ("alias", "trajectory", "version")  # query parameters whose values are recorded
_MAX_CHARS = 128  # of a value
_NO_KEY = "without a key"
_FEEDBACK = "/feedback"  # accepted while the store is down, and recorded there with its key

_Handle = Callable[[Request], Awaitable[Response]]


class Action(NamedTuple):
    """A request of an operator. Equal reads are one entry."""

    key_id: str | None
    actor: str
    client: str | None
    method: str
    route: str
    target: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, request: Request, route: str) -> Action:
        """Return the action of a request to a route."""
        caller: Caller = request.scope[CALLER]
        key_id, actor = caller.operator_key or (None, _NO_KEY)
        named: Mapping[str, Any] = {name: request.query_params.get(name) for name in _NAMING} | request.path_params
        target = tuple((name, str(value)[:_MAX_CHARS]) for name, value in named.items() if value is not None)
        return cls(key_id, actor, client_address(request.scope), request.method, route, target)

    @property
    def is_change(self) -> bool:
        """Whether it has its entry before it happens."""
        return self.method not in ("GET", "HEAD") and self.route != _FEEDBACK

    def entry(self, now: float, status: int | None) -> AuditEntry:
        """Return a new entry."""
        return AuditEntry(
            id=new_id("audit"), at=now, last_at=now, count=1, actor=self.actor, method=self.method, route=self.route,
            target=dict(self.target), key_id=self.key_id, client=self.client, status=status,
        )  # fmt: skip


class AuditLog:
    """The service. Its state belongs to the event loop's thread."""

    def __init__(self, store: Store, keep_seconds: float, critical_tasks: CriticalTasks) -> None:
        self._store = store
        self._keep_seconds = keep_seconds
        self._critical_tasks = critical_tasks
        self._reads: dict[tuple[Action, int], AuditEntry] = {}  # those that may be counted up
        self._unwritten: dict[str, AuditEntry] = {}  # by id
        self._pruned_at = float("-inf")  # monotonic
        self._task: asyncio.Task[None] | None = None

    async def begin_change(self, action: Action) -> AuditEntry:
        """Record a change that is about to happen. Raises StoreUnavailable."""
        entry = action.entry(time.time(), None)
        await run_lookup(self._store.audit.record, [entry])
        return entry

    def end(self, action: Action, change: AuditEntry | None, status: int) -> None:
        """Record the outcome of a change that was begun, else count the read."""
        if change is None:
            self._count(action, status)
        else:
            self._keep(msgspec.structs.replace(change, status=status, last_at=time.time()))

    def _count(self, action: Action, status: int) -> None:
        now = time.time()
        known = self._reads.pop((action, status), None)
        if known is None or now - known.at > _MERGE_SECONDS:
            entry = action.entry(now, status)
        else:
            entry = msgspec.structs.replace(known, count=known.count + 1, last_at=now)
        self._reads[action, status] = entry
        if len(self._reads) > _MAX_ENTRIES:
            del self._reads[next(iter(self._reads))]
        self._keep(entry)

    async def start(self) -> None:
        """Start writing."""
        self._task = self._critical_tasks.start_task(self._run(), "audit log")

    async def stop(self) -> None:
        """Write what is left, and stop."""
        if self._task is not None:
            await self._critical_tasks.stop_tasks(self._task)
        await self._flush()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_FLUSH_SECONDS)
            await self._flush()
            if time.monotonic() - self._pruned_at > _PRUNE_SECONDS:
                await self._prune()

    async def _flush(self) -> None:
        entries = dict(self._unwritten)
        if not entries:
            return
        try:
            await run_lookup(self._store.audit.record, list(entries.values()))
        except StoreError as error:
            log.warning("event=audit_not_written entries=%d reason=%r", len(entries), str(error))
            return
        for name, entry in entries.items():
            if self._unwritten.get(name) is entry:
                del self._unwritten[name]

    async def _prune(self) -> None:
        try:
            while await run_lookup(self._store.audit.prune, time.time() - self._keep_seconds):
                pass
            self._pruned_at = time.monotonic()
        except StoreError as error:
            log.warning("event=audit_not_pruned reason=%r", str(error))

    def _keep(self, entry: AuditEntry) -> None:
        self._unwritten[entry.id] = entry
        if len(self._unwritten) > _MAX_ENTRIES:
            lost = self._unwritten.pop(next(iter(self._unwritten)))
            log.error("event=audit_entry_lost actor=%r method=%s route=%s", lost.actor, lost.method, lost.route)


def audited_routes(audit: AuditLog) -> type[APIRoute]:
    """Return the class of routes whose requests are recorded, if they are an operator's."""

    class AuditedRoute(APIRoute):
        def get_route_handler(self) -> Any:
            handle: _Handle = super().get_route_handler()

            async def audited(request: Request) -> Response:
                if not request.scope[CALLER].operator:  # an agent's feedback
                    return await handle(request)
                action = Action.of(request, self.path_format)
                change = await audit.begin_change(action) if action.is_change else None
                try:
                    response = await handle(request)
                except Exception as error:
                    audit.end(action, change, status_of(error))
                    raise
                audit.end(action, change, response.status_code)
                return response

            return audited

    return AuditedRoute
