"""The known API keys: those of the environment, and a copy of the store's keys that a task refreshes.

Promises: while the store is down, the last copy stays in use, so that an outage locks nobody out. A revoked key is
rejected within `refresh_seconds` after the store answers again. Until the store's keys have been read once, only keys
of the environment are accepted; without them, no request is. An unknown key triggers a look-up, because it may be new.

Keys are required as soon as one exists, even a revoked one: revoking the last key does not turn authentication off. On
a host that other machines can reach, keys are always required. Only the SHA-256 of a key is stored.

All state belongs to the event loop's thread; the store is read in a thread of its own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from typing import TypeVar

import msgspec

from ratchet.proxy.api_keys import KEYS_VARIABLE, OPERATOR_KEYS_VARIABLE, is_loopback
from ratchet.proxy.coordinator.limits.rate_limits import KeyMeter
from ratchet.proxy.coordinator.limits.sharing import Sharing
from ratchet.proxy.coordinator.limits.token_budgets import Budgets, TokenBudget
from ratchet.proxy.coordinator.versions.policy_cache import FULL_ACCESS, Access
from ratchet.proxy.errors import InvalidApiKey, NotReady, ProxyError
from ratchet.proxy.runtime.critical_tasks import CriticalTasks
from ratchet.proxy.settings import ProxySettings
from ratchet.store.errors import StoreError
from ratchet.store.operation_records import Key, KeyTokens
from ratchet.store.states import KeyScope
from ratchet.store.store import Store

log = logging.getLogger("ratchet.proxy")

_T = TypeVar("_T")

_NO_BUDGET = Budgets()

_RECORD_USE_SECONDS = 60.0  # between records of when keys were used last
_MIN_REFRESH_SECONDS = 0.25  # between refreshes for unknown keys
_REFRESH_TIMEOUT = 1.0  # seconds that a request waits for such a refresh


class Caller(msgspec.Struct, frozen=True):
    """The caller of a request, by its API key. Fixed when the request arrives."""

    key_id: str | None  # names the key in records
    trajectory: str | None = None  # named by a suffix of the key
    meter: KeyMeter | None = None  # the key's limits
    operator: bool = False  # may read everything, and give feedback on everything
    operator_key: tuple[str, str] | None = None  # id and name of the operator's key
    access: Access = FULL_ACCESS
    max_parallel_requests: int | None = None
    max_tokens: int | None = None  # of each answer
    expires_at: float | None = None


ANONYMOUS = Caller(None)
OPERATOR = Caller(None, operator=True)


class KeyCache:
    """The known keys by their SHA-256. `sharing`: of their limits with other workers."""

    def __init__(
        self,
        settings: ProxySettings,
        store: Store,
        critical_tasks: CriticalTasks | None = None,
        refresh_seconds: float = 2.0,
        sharing: Sharing | None = None,
    ) -> None:
        self._sharing = sharing
        self._store = store
        self._critical_tasks = critical_tasks or CriticalTasks()
        self._settings = settings
        self._is_reachable = not is_loopback(settings.host)
        self._default_limits = (
            settings.requests_per_minute,
            settings.tokens_per_minute,
        )  # of keys without their own limits
        self._meters: dict[str, KeyMeter] = {}  # by key id
        self._max_parallel = settings.max_parallel_requests_per_key
        self.anyone = Caller(
            None, meter=self._meter("", self._default_limits), max_parallel_requests=self._max_parallel
        )
        self._environment = {
            hashed: Caller(
                hashed[:16],
                meter=self._meter(hashed[:16], self._default_limits),
                max_parallel_requests=self._max_parallel,
            )
            for hashed in settings.key_hashes
        }
        self._operator_hashes = settings.operator_hashes
        self._refresh_seconds = refresh_seconds
        self._rows: tuple[Key, ...] | None = None  # the store's, last read; None: not read yet
        self._agents = dict(self._environment)
        self._operators: dict[str, float | None] = dict.fromkeys(self._operator_hashes)  # with their expiry
        self._operator_names = {one: (one[:16], OPERATOR_KEYS_VARIABLE) for one in self._operator_hashes}
        self._agents_need_keys = bool(self._environment) or self._is_reachable
        self._used: set[str] = set()
        self._use_recorded_at = time.monotonic()
        self._task: asyncio.Task[None] | None = None
        self._refresh_task: asyncio.Task[None] | None = None  # for a key that is not known
        self._refreshed_at = 0.0
        self._thread = ThreadPoolExecutor(1, "keys")

    # --- for every request ---------------------------------------------------------------------------------

    @property
    def key_needed(self) -> bool:
        """Whether agents need a key. Raises NotReady until that is known."""
        if self._agents_need_keys:
            return True
        if self._rows is None:
            raise NotReady("the API keys have not been read from the store yet; try again in a moment")
        return False

    @property
    def operator_key_needed(self) -> bool:
        """Whether the operator API needs a key. Raises NotReady until that is known."""
        return bool(self._operators) or self.key_needed or bool(self._rows)

    def caller_of(self, hashed: str) -> Caller | None:
        """Return the caller with this key; None if it is not an agent's key. Raises InvalidApiKey if it expired."""
        caller = self._agents.get(hashed)
        if caller is not None:
            _check_expiry(caller.expires_at)
            self._used.add(hashed)
        return caller

    def is_operator_key(self, hashed: str) -> bool:
        """Return whether a key is an operator's. Raises InvalidApiKey if it expired."""
        if hashed not in self._operators:
            return False
        _check_expiry(self._operators[hashed])
        self._used.add(hashed)
        return True

    def operator_of(self, hashed: str) -> Caller:
        """Return the operator with this key, which was checked; one without a key if none is needed."""
        key = self._operator_names.get(hashed)
        return OPERATOR if key is None else msgspec.structs.replace(OPERATOR, operator_key=key)

    def is_known_key(self, hashed: str) -> bool:
        """Return whether a key is an agent's or an operator's."""
        return hashed in self._agents or hashed in self._operators

    async def refresh_keys(self) -> None:
        """Read the store's keys again, for an unknown key that may be new. Rate-limited against wrong keys."""
        if self._refresh_task is None and time.monotonic() - self._refreshed_at > _MIN_REFRESH_SECONDS:
            self._refresh_task = asyncio.create_task(self._refresh())
        if self._refresh_task is not None:
            await asyncio.wait([self._refresh_task], timeout=_REFRESH_TIMEOUT)
            if self._refresh_task is not None and self._refresh_task.done():
                self._refresh_task, self._refreshed_at = None, time.monotonic()

    @property
    def has_operators(self) -> bool:
        """Whether there is any operator's key."""
        return bool(self._operators)

    # --- the copy ------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Read the store's keys. Raises ProxyError if other machines can reach the host and no agent has a key."""
        await self._refresh()
        if self._rows is not None:
            check_host_has_keys(self._settings, self._rows)
        self._task = self._critical_tasks.start_task(self._run(), "keys")

    async def stop(self) -> None:
        """Record which keys were used, and stop."""
        if self._task is not None:
            await self._critical_tasks.stop_tasks(self._task)
        if self._refresh_task is not None:
            await asyncio.wait([self._refresh_task])
        self._use_recorded_at = 0.0
        await self._record_use()
        self._thread.shutdown(wait=False)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._refresh_seconds)
            await self._refresh()
            await self._record_use()

    async def _refresh(self) -> None:
        try:
            rows, tokens = await self._in_thread(self._read)
        except StoreError as error:
            log.warning("event=keys_not_read reason=%r", str(error))
            return
        if rows != self._rows:
            self._replace_copy(rows, tokens)
        for key_id, used in tokens.items():
            meter = self._meters.get(key_id)
            if meter is not None and meter.budget is not None:
                meter.budget.read(used)

    def _read(self) -> tuple[tuple[Key, ...], dict[str, KeyTokens]]:
        """Return the store's keys, and what those with a budget have used. Called in the thread."""
        rows = tuple(self._store.keys.all())
        with_budget = [row.id for row in rows if row.revoked_at is None and _budgets(row) != _NO_BUDGET]
        return rows, self._store.usage.of_keys(with_budget) if with_budget else {}

    def _replace_copy(self, rows: tuple[Key, ...], tokens: Mapping[str, KeyTokens]) -> None:
        agents = {
            row.hash: Caller(
                row.id,
                meter=self._meter(
                    row.id, (row.requests_per_minute, row.tokens_per_minute), _budgets(row), tokens.get(row.id)
                ),
                access=Access(_names(row.agents), _names(row.models)),
                max_parallel_requests=row.max_parallel_requests or self._max_parallel,
                max_tokens=row.max_tokens,
                expires_at=row.expires_at,
            )
            for row in _not_revoked(rows, KeyScope.AGENT)
        }
        gone = {row.id for row in rows if row.revoked_at is not None}
        self._meters = {key_id: meter for key_id, meter in self._meters.items() if key_id not in gone}
        self._rows = rows
        self._agents = {**agents, **self._environment}
        stored = {row.hash: row.expires_at for row in _not_revoked(rows, KeyScope.OPERATOR)}
        self._operators = stored | dict.fromkeys(self._operator_hashes)
        names = {row.hash: (row.id, row.name) for row in _not_revoked(rows, KeyScope.OPERATOR)}
        self._operator_names = names | {one: (one[:16], OPERATOR_KEYS_VARIABLE) for one in self._operator_hashes}
        self._agents_need_keys = (
            bool(self._environment) or self._is_reachable or any(row.scope == KeyScope.AGENT for row in rows)
        )

    def _meter(
        self,
        key_id: str,
        limits: tuple[int | None, int | None],
        budgets: Budgets = _NO_BUDGET,
        used: KeyTokens | None = None,
    ) -> KeyMeter | None:
        """Return the meter of a key; the existing one if its limits are unchanged, None without limits."""
        limits = (limits[0] or self._default_limits[0], limits[1] or self._default_limits[1])
        if limits == (None, None) and budgets == _NO_BUDGET:
            self._meters.pop(key_id, None)
            return None
        known = self._meters.get(key_id)
        if known is None or known.limits != limits:
            budget = known.budget if known is not None else None
            name = f"key {key_id}"
            known = self._meters[key_id] = KeyMeter(*limits, budget=budget, shared_as=name, sharing=self._sharing)
        if budgets == _NO_BUDGET or used is None:
            known.budget = None
        elif known.budget is None or known.budget.budgets != budgets:
            known.budget = TokenBudget(budgets, used, f"key {key_id}", self._sharing)
        return known

    async def _record_use(self) -> None:
        """Record in the store which keys were used: a first use at once, later ones about once a minute."""
        now = time.monotonic()
        is_first_use = any(row.last_used_at is None and row.hash in self._used for row in self._rows or ())
        if not self._used or (now - self._use_recorded_at < _RECORD_USE_SECONDS and not is_first_use):
            return
        used, self._used, self._use_recorded_at = self._used, set(), now
        ids = [row.id for row in self._rows or () if row.hash in used]
        try:
            if ids:
                await self._in_thread(partial(self._store.keys.record_use, ids, time.time()))
        except StoreError as error:
            log.warning("event=keys_not_noted reason=%r", str(error))

    async def _in_thread(self, verb: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, verb)


def check_host_has_keys(settings: ProxySettings, rows: Iterable[Key]) -> None:
    """Raise ProxyError if other machines can reach the host and no agent has a valid key. `rows`: the store's keys."""
    if is_loopback(settings.host) or settings.key_hashes:
        return
    now = time.time()
    if any(row.expires_at is None or row.expires_at > now for row in _not_revoked(rows, KeyScope.AGENT)):
        return
    raise ProxyError(
        f"host {settings.host} can be reached from other machines, but there is no API key: create one with "
        f"`ratchet keys create --name NAME`, or set {KEYS_VARIABLE} to one or more keys, separated by commas, "
        "or use host 127.0.0.1"
    )


def _not_revoked(rows: Iterable[Key], scope: KeyScope) -> Iterable[Key]:
    return (row for row in rows if row.scope == scope and row.revoked_at is None)


def _budgets(row: Key) -> Budgets:
    return Budgets(row.tokens_per_day, row.tokens_per_month)


def _names(names: Iterable[str] | None) -> frozenset[str] | None:
    return None if names is None else frozenset(names)


def _check_expiry(expires_at: float | None) -> None:
    if expires_at is not None and time.time() >= expires_at:
        at = datetime.fromtimestamp(expires_at, UTC).strftime("%Y-%m-%d %H:%M UTC")
        raise InvalidApiKey(
            f"the API key expired at {at}: ask the operator for a new one (`ratchet keys create`)",
            code="expired_api_key",
        )
