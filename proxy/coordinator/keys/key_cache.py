"""The keys that are known now: those of the environment, and a copy of the store's that a task renews.

Promises: a store that does not answer leaves the last copy in use, so that an outage locks nobody out; a key that was
revoked is refused within `refresh_seconds` of the store's answering again. Until the store's keys have been read once,
only the environment's open the door, and where there are none, nothing does: a door that may need keys is not open.
A key that was made a moment ago is looked for when it first comes. The copy lives in this process; a proxy cannot start
while the store is down.

Keys are required as soon as there is one, also a revoked one: revoking the last key does not open the door. On a host
that other machines reach they are required always. Keys themselves are never kept, only SHA-256.

Belongs to the event loop's thread; the store is asked in one of its own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from ratchet.proxy.api_keys import KEYS_VARIABLE, is_loopback
from ratchet.proxy.coordinator.keys.caller import Caller
from ratchet.proxy.coordinator.limits.rate_limits import KeyMeter
from ratchet.proxy.errors import NotReady, StartError
from ratchet.proxy.runtime.critical_tasks import CriticalTasks
from ratchet.proxy.settings import ProxySettings
from ratchet.store.errors import StoreError
from ratchet.store.records import Key
from ratchet.store.states import KeyScope
from ratchet.store.store import Store

log = logging.getLogger("ratchet.proxy")

_T = TypeVar("_T")

_NOTE_EVERY = 60.0  # seconds between notes of when keys were used last
_LOOK_EVERY = 0.25  # seconds between looks for a key that is not known
_LOOK_PATIENCE = 1.0  # seconds that a request waits for such a look


class KeyCache:
    """The known keys by their SHA-256."""

    def __init__(
        self,
        settings: ProxySettings,
        store: Store,
        critical_tasks: CriticalTasks | None = None,
        refresh_seconds: float = 2.0,
    ) -> None:
        self._store = store
        self._critical_tasks = critical_tasks or CriticalTasks()
        self._settings = settings
        self._is_reachable = not is_loopback(settings.host)
        self._usual = (settings.requests_per_minute, settings.tokens_per_minute)  # of keys without limits of their own
        self._meters: dict[str, KeyMeter] = {}  # by key id
        self.anyone = Caller(None, meter=self._meter("", self._usual))
        self._environment = {
            hashed: Caller(hashed[:16], meter=self._meter(hashed[:16], self._usual)) for hashed in settings.key_hashes
        }
        self._operator_hashes = settings.operator_hashes
        self._refresh_seconds = refresh_seconds
        self._rows: tuple[Key, ...] | None = None  # the store's, last read; None: not read yet
        self._agents = dict(self._environment)
        self._operators = set(self._operator_hashes)
        self._agents_need_keys = bool(self._environment) or self._is_reachable
        self._used: set[str] = set()
        self._noted_at = time.monotonic()
        self._task: asyncio.Task[None] | None = None
        self._refresh_task: asyncio.Task[None] | None = None  # for a key that is not known
        self._looked_at = 0.0
        self._thread = ThreadPoolExecutor(1, "keys")

    # --- asked with every request --------------------------------------------------------------------------

    @property
    def key_needed(self) -> bool:
        """Whether agents need a key. Raises NotReady where that is not known yet."""
        if self._agents_need_keys:
            return True
        if self._rows is None:
            raise NotReady("the store has not told its API keys yet; try again in a moment")
        return False

    @property
    def operator_key_needed(self) -> bool:
        """Whether the operator API needs a key. Raises NotReady where that is not known yet."""
        return bool(self._operators) or self.key_needed or bool(self._rows)

    def caller_of(self, hashed: str) -> Caller | None:
        """Return whose key it is; None where it is no agent's."""
        caller = self._agents.get(hashed)
        if caller is not None:
            self._used.add(hashed)
        return caller

    def is_operator_key(self, hashed: str) -> bool:
        """Return whether a key opens the operator API."""
        if hashed not in self._operators:
            return False
        self._used.add(hashed)
        return True

    def is_known_key(self, hashed: str) -> bool:
        """Return whether a key opens anything."""
        return hashed in self._agents or hashed in self._operators

    async def refresh_keys(self) -> None:
        """Look into the store for a key that was made just now; few looks, however many wrong keys there are."""
        if self._refresh_task is None and time.monotonic() - self._looked_at > _LOOK_EVERY:
            self._refresh_task = asyncio.create_task(self._look())
        if self._refresh_task is not None:
            await asyncio.wait([self._refresh_task], timeout=_LOOK_PATIENCE)
            if self._refresh_task is not None and self._refresh_task.done():
                self._refresh_task, self._looked_at = None, time.monotonic()

    @property
    def has_operators(self) -> bool:
        """Whether there is any operator's key."""
        return bool(self._operators)

    # --- the copy ------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Read the store's keys. Raises StartError on a host that others reach where no agent has a key."""
        await self._look()
        if self._rows is not None:
            check_host_has_keys(self._settings, self._rows)
        self._task = self._critical_tasks.start_task(self._run(), "keys")

    async def stop(self) -> None:
        """Write down which keys were used, and end."""
        if self._task is not None:
            await self._critical_tasks.stop_tasks(self._task)
        if self._refresh_task is not None:
            await asyncio.wait([self._refresh_task])
        self._noted_at = 0.0
        await self._note()
        self._thread.shutdown(wait=False)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._refresh_seconds)
            await self._look()
            await self._note()

    async def _look(self) -> None:
        try:
            rows = tuple(await self._ask(self._store.keys.all))
        except StoreError as error:
            log.warning("event=keys_not_read reason=%r", str(error))
            return
        if rows != self._rows:
            self._take(rows)

    def _take(self, rows: tuple[Key, ...]) -> None:
        agents = {
            row.hash: Caller(row.id, meter=self._meter(row.id, (row.requests_per_minute, row.tokens_per_minute)))
            for row in _standing(rows, KeyScope.AGENT)
        }
        gone = {row.id for row in rows if row.revoked_at is not None}
        self._meters = {key_id: meter for key_id, meter in self._meters.items() if key_id not in gone}
        self._rows = rows
        self._agents = {**agents, **self._environment}
        self._operators = {*self._operator_hashes, *(row.hash for row in _standing(rows, KeyScope.OPERATOR))}
        self._agents_need_keys = (
            bool(self._environment) or self._is_reachable or any(row.scope == KeyScope.AGENT for row in rows)
        )

    def _meter(self, key_id: str, limits: tuple[int | None, int | None]) -> KeyMeter | None:
        """Return the meter of a key, the one that it has where its limits are the same; None where it has no limits."""
        limits = (limits[0] or self._usual[0], limits[1] or self._usual[1])
        if limits == (None, None):
            self._meters.pop(key_id, None)
            return None
        known = self._meters.get(key_id)
        if known is None or known.limits != limits:
            known = self._meters[key_id] = KeyMeter(*limits)
        return known

    async def _note(self) -> None:
        """Tell the store about once a minute which of its keys were used; of a first use at once."""
        now = time.monotonic()
        first = any(row.last_used_at is None and row.hash in self._used for row in self._rows or ())
        if not self._used or (now - self._noted_at < _NOTE_EVERY and not first):
            return
        used, self._used, self._noted_at = self._used, set(), now
        ids = [row.id for row in self._rows or () if row.hash in used]
        try:
            if ids:
                await self._ask(partial(self._store.keys.record_use, ids, time.time()))
        except StoreError as error:
            log.warning("event=keys_not_noted reason=%r", str(error))

    async def _ask(self, verb: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, verb)


def check_host_has_keys(settings: ProxySettings, rows: Iterable[Key]) -> None:
    """Raise StartError on a host that others reach where no agent has a key; `rows` are the store's keys."""
    if is_loopback(settings.host) or settings.key_hashes or any(_standing(rows, KeyScope.AGENT)):
        return
    raise StartError(
        f"host {settings.host} can be reached from other machines and there is no API key: make one with "
        f"`ratchet keys create --name NAME`, or set {KEYS_VARIABLE} to one or more keys, separated by commas, "
        "or use host 127.0.0.1"
    )


def _standing(rows: Iterable[Key], scope: KeyScope) -> Iterable[Key]:
    return (row for row in rows if row.scope == scope and row.revoked_at is None)
