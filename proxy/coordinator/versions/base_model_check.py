"""Checks that every replica serves the base model of the alias's versions.

A replica gets a few fixed requests (`store/policies/fingerprints.py`) when it first appears, when it is reachable
again, when it names another model, and every few minutes: eight short prompts for one token each, in a background task,
never on the path of a call. The responses of the first replica of an alias are stored with version 0. A replica with
other responses is reported by `/health/ready` and by an alarm, and gets no calls while another replica is right.

Models with equal responses cannot be distinguished here: `ratchet up` and the trainer also compare the files.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec

from ratchet.proxy.errors import UpstreamError
from ratchet.proxy.runtime.critical_tasks import CriticalTasks
from ratchet.proxy.upstreams.replica_pool import Replica
from ratchet.proxy.upstreams.vllm_client import Upstream
from ratchet.store.errors import StoreError
from ratchet.store.policies import fingerprints
from ratchet.store.store import Store

log = logging.getLogger("ratchet.proxy")

CHECK_INTERVAL = 300.0  # seconds between checks without another reason
_TIMEOUT = 60.0  # seconds for all responses
_RETRY_SECONDS = 2.0  # after a failed check
_MISMATCH_RETRY_SECONDS = 10.0  # after a check that found another base model

Card = Mapping[str, Any]


class BaseModelCheck:
    """The service. `list_models` returns a replica's model cards. It raises UpstreamError if the replica is down."""

    def __init__(
        self,
        alias: str,
        store: Store,
        upstream: Upstream,
        list_models: Callable[[Replica], Awaitable[list[dict[str, Any]]]],
        every: float = CHECK_INTERVAL,
        critical_tasks: CriticalTasks | None = None,
    ) -> None:
        self._alias = alias
        self._store = store
        self._upstream = upstream
        self._list_models = list_models
        self._every = every
        self._problems: dict[str, str] = {}  # by replica
        self._roots: dict[str, str] = {}  # the base model that each replica named last
        self._due_at: dict[str, float] = {}
        self._failures: Counter[str] = Counter()  # in a row, by replica
        self._waiting: dict[str, tuple[Replica, Card]] = {}
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "base-model")
        self._critical_tasks = critical_tasks or CriticalTasks()
        self._task: asyncio.Task[None] | None = None

    async def look(self, replica: Replica) -> None:
        """Probe a replica, and schedule a check if one is due.

        Raises UpstreamError if the replica is down, or serves another base model.
        """
        try:
            cards = await self._list_models(replica)
        except UpstreamError:
            self._due_at[replica.url] = 0.0
            raise
        card = next((card for card in cards if not card.get("parent") and isinstance(card.get("id"), str)), None)
        if card is None:
            return
        named = str(card.get("root"))
        if self._roots.get(replica.url) != named or time.monotonic() >= self._due_at.get(replica.url, 0.0):
            self._roots[replica.url], self._due_at[replica.url] = named, time.monotonic() + _TIMEOUT
            self._waiting[replica.url] = (replica, card)
            self._wake.set()
        if problem := self._problems.get(replica.url):
            raise UpstreamError(problem)

    async def start(self) -> None:
        """Start the checks."""
        self._task = self._critical_tasks.start_task(self._run(), "base-check")

    async def stop(self) -> None:
        """Stop the checks."""
        if self._task is not None:
            await self._critical_tasks.stop_tasks(self._task)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                _, (replica, card) = self._waiting.popitem()
                try:
                    async with asyncio.timeout(_TIMEOUT):
                        await self._compare(replica, card)
                except (UpstreamError, StoreError, TimeoutError) as error:
                    pause = min(self._every, _RETRY_SECONDS * 2 ** self._failures[replica.url])
                    self._failures[replica.url] += 1
                    self._due_at[replica.url] = time.monotonic() + pause
                    log.warning("event=base_model_not_compared upstream=%s reason=%r", replica.label, str(error))

    async def _compare(self, replica: Replica, card: Card) -> None:
        named = str(card.get("root"))
        fingerprint = {"root": named, **await self._fingerprint(replica.url, str(card["id"]))}
        known = await self._in_thread(partial(self._store.base_models.base_model_of, self._alias))
        if known is None or not known.server_fingerprint:
            registered = await self._in_thread(
                partial(self._store.base_models.register_base_model, self._alias, named, server_fingerprint=fingerprint)
            )
            if registered is None:  # version 0 is not registered yet
                self._due_at[replica.url] = time.monotonic() + _RETRY_SECONDS
                return
            log.info(
                "event=base_model_taken_up alias=%s name=%s upstream=%s", self._alias, registered.name, replica.label
            )
            known = registered
        self._failures.pop(replica.url, None)
        difference = fingerprints.difference(known.server_fingerprint, fingerprint)
        pause = self._every if difference is None else _MISMATCH_RETRY_SECONDS
        self._due_at[replica.url] = time.monotonic() + pause
        await self._record_result(replica, named, known.name, difference)

    async def _record_result(self, replica: Replica, named: str, known: str, difference: str | None) -> None:
        """Record the result of a check, and raise or clear the alarm."""
        replica.serves_other_base_model = difference is not None
        name = f"base_model:{self._alias}"
        if difference is not None:
            reason = (
                f"upstream {replica.url} serves {named}, which is not the base model that the versions of "
                f"{self._alias} belong to, {known}: {difference}; start vLLM with {known} again, or give the other "
                "model a project or an alias of its own"
            )
            if self._problems.get(replica.url) != reason:
                log.error("event=other_base_model upstream=%s reason=%r", replica.label, reason)
            self._problems[replica.url] = reason
            await self._in_thread(partial(self._store.alarms.raise_, name, reason))
        elif self._problems.pop(replica.url, None) is not None:
            log.info("event=base_model_is_back upstream=%s name=%s", replica.label, named)
            if not self._problems:
                await self._in_thread(partial(self._store.alarms.clear, name))

    async def _fingerprint(self, url: str, model: str) -> dict[str, Any]:
        """Return a replica's responses; parts that it does not offer are left out. Raises UpstreamError."""
        parts: dict[str, Any] = {}
        for part, (path, body) in fingerprints.requests(model).items():
            answer = await self._upstream.post_json(url, path, msgspec.json.encode(body))
            try:
                text = await answer.read()
            finally:
                answer.close()
            if answer.status >= 500 and answer.status != 501:
                raise UpstreamError(f"upstream {url} answered {path} with {answer.status}")
            with contextlib.suppress(msgspec.DecodeError, ValueError):
                parts[part] = fingerprints.read(part, msgspec.json.decode(text))
        return parts

    async def _in_thread(self, verb: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, verb)
