"""Checks that every replica serves the base model of the agents' versions.

A replica gets a few fixed requests (`store/policies/fingerprints.py`) when it first appears, when it is reachable
again, when it names another model, and every few minutes: eight short prompts for one token each, in a background task,
never on the path of a call. The responses of the first replica of an agent are stored with version 0; a replica that
serves another base model than that of every other agent is not taken for a new agent. A replica with other responses
raises the agent's alarm. If they are other responses than those of every agent, `/health/ready` reports it too, and the
replica gets no calls while another replica is right. So one agent whose base model is not served stops no other agent.

Models with equal responses cannot be distinguished here: `ratchet up` and the trainer also compare the files.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
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
from ratchet.store.records import BaseModel
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
        aliases: Callable[[], Sequence[str]],
        store: Store,
        upstream: Upstream,
        list_models: Callable[[Replica], Awaitable[list[dict[str, Any]]]],
        every: float = CHECK_INTERVAL,
        critical_tasks: CriticalTasks | None = None,
    ) -> None:
        self._aliases = aliases
        self._store = store
        self._upstream = upstream
        self._list_models = list_models
        self._every = every
        self._problems: dict[str, str] = {}  # of all agents, by replica
        self._mismatches: dict[str, dict[str, str]] = {}  # reasons by agent and replica
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
        known: dict[str, BaseModel] = {}
        for alias in self._aliases():
            base = await self._in_thread(partial(self._store.base_models.base_model_of, alias))
            if base is not None and base.server_fingerprint:
                known[alias] = base
        seen = [fingerprints.difference(one.server_fingerprint, fingerprint) for one in known.values()]
        is_right = not known or None in seen
        missing = [alias for alias in self._aliases() if alias not in known] if is_right else []
        for alias in missing:
            registered = await self._take_up(alias, named, fingerprint, replica)
            known |= {alias: registered} if registered is not None else {}
        is_complete = all(alias in known for alias in missing)
        self._failures.pop(replica.url, None)
        pause = self._every if is_right else _MISMATCH_RETRY_SECONDS
        self._due_at[replica.url] = time.monotonic() + (pause if is_complete else _RETRY_SECONDS)
        replica.serves_other_base_model = not is_right
        for alias, one in known.items():
            difference = fingerprints.difference(one.server_fingerprint, fingerprint)
            await self._record_result(replica, alias, named, one.name, difference)
        if is_right:
            self._problems.pop(replica.url, None)
        else:
            self._problems[replica.url] = self._mismatches[next(iter(known))][replica.url]
        for alias in self._mismatches.keys() - set(self._aliases()):  # it left
            if self._mismatches.pop(alias):
                await self._in_thread(partial(self._store.alarms.clear, f"base_model:{alias}"))

    async def _take_up(
        self, alias: str, named: str, fingerprint: Mapping[str, Any], replica: Replica
    ) -> BaseModel | None:
        """Store the base model of an agent that has none, and return it; None if version 0 is not registered yet."""
        register = partial(self._store.base_models.register_base_model, alias, named, server_fingerprint=fingerprint)
        registered: BaseModel | None = await self._in_thread(register)
        if registered is not None:
            log.info("event=base_model_taken_up alias=%s name=%s upstream=%s", alias, registered.name, replica.label)
        return registered

    async def _record_result(
        self, replica: Replica, alias: str, named: str, known: str, difference: str | None
    ) -> None:
        """Record the result of a check for one agent, and raise or clear its alarm."""
        name, reasons = f"base_model:{alias}", self._mismatches.setdefault(alias, {})
        if difference is not None:
            reason = (
                f"upstream {replica.url} serves {named}, which is not the base model that the versions of "
                f"{alias} belong to, {known}: {difference}; start vLLM with {known} again, or give the other "
                "model a project or an alias of its own"
            )
            if reasons.get(replica.url) != reason:
                log.error("event=other_base_model upstream=%s reason=%r", replica.label, reason)
            reasons[replica.url] = reason
            await self._in_thread(partial(self._store.alarms.raise_, name, reason))
        elif reasons.pop(replica.url, None) is not None:
            log.info("event=base_model_is_back alias=%s upstream=%s name=%s", alias, replica.label, named)
            if not reasons:
                await self._in_thread(partial(self._store.alarms.clear, name))

    def check_again(self) -> None:
        """Compare every replica at its next probe: an agent joined."""
        self._due_at.clear()

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
                raise UpstreamError(f"answered {path} with {answer.status}", url=url)
            with contextlib.suppress(msgspec.DecodeError, ValueError):
                parts[part] = fingerprints.read(part, msgspec.json.decode(text))
        return parts

    async def _in_thread(self, verb: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, verb)
