"""Registers the base model that the replicas serve as version 0 of every agent, under the name that vLLM gives it.

All agents share the one base model, whatever its name in vLLM's /v1/models is. It is registered at the start, when an
agent joins, and when no replica serves the registered name any more: vLLM was started again under another one. Until a
replica and the store answer, it is tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from ratchet.proxy.coordinator.versions.policy_cache import PolicyCache
from ratchet.proxy.errors import UpstreamError
from ratchet.proxy.runtime.critical_tasks import CriticalTasks
from ratchet.proxy.upstreams.vllm_client import Upstream
from ratchet.store.errors import InvalidRecord
from ratchet.store.records import BASE_VERSION
from ratchet.store.store import Store

log = logging.getLogger("ratchet.proxy")

_RETRY_SECONDS = 0.5
_TIMEOUT = 10.0  # seconds for a replica's list of models
_CHECK_SECONDS = 5.0  # between looks at the names that the replicas serve


class BaseRegistration:
    """The service."""

    def __init__(
        self, policies: PolicyCache, store: Store, upstream: Upstream, critical_tasks: CriticalTasks | None = None
    ) -> None:
        self._policies = policies
        self._store = store
        self._upstream = upstream
        self._critical_tasks = critical_tasks or CriticalTasks()
        self._registered: dict[str, str] = {}  # the served name by agent
        self._task: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "base-registration")

    async def start(self) -> None:
        """Start the task."""
        self._task = self._critical_tasks.start_task(self._run(), "discover")

    async def stop(self) -> None:
        """Stop the task."""
        if self._task is not None:
            await self._critical_tasks.stop_tasks(self._task)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _run(self) -> None:
        last_error = ""
        changed = self._policies.agents_changed
        while True:
            changed.clear()
            pause = _CHECK_SECONDS
            try:
                await self._register()
                last_error = ""
            except Exception as error:  # noqa: BLE001 -- retried until a replica and the store answer
                pause = _CHECK_SECONDS if self._is_complete() else _RETRY_SECONDS
                if str(error) != last_error:
                    last_error = str(error)
                    log.warning("event=base_model_not_found reason=%r", last_error)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), pause)

    def _is_complete(self) -> bool:
        return all(alias in self._registered for alias in self._policies.aliases)

    async def _register(self) -> None:
        """Register version 0 of each agent that needs it. Raises UpstreamError, StoreError."""
        names = await self._served_names()
        self._registered = {a: name for a, name in self._registered.items() if a in self._policies.aliases}
        wanted = [alias for alias in self._policies.aliases if self._registered.get(alias) not in names]
        if not wanted:
            return
        common = next((name for name in self._registered.values() if name in names), names[0])
        refused: InvalidRecord | None = None
        for alias in wanted:
            try:
                await self._in_thread(partial(self._store.policies.register_base, alias, common))
            except InvalidRecord as error:  # its name; the other agents go on
                refused = error
                continue
            self._registered[alias] = common
            log.info("event=base_model_registered alias=%s version=%d served=%s", alias, BASE_VERSION, common)
        await self._policies.refresh_now()
        if refused is not None:
            raise refused

    async def _served_names(self) -> list[str]:
        """Return the names of the base model at the replicas that answer. Raises UpstreamError if there is none."""
        found = await asyncio.gather(*map(self._names_at, self._upstream.urls))
        names = [name for one in found if isinstance(one, list) for name in one]
        errors = [one for one in found if isinstance(one, UpstreamError)]
        if not names:
            raise errors[0] if errors else UpstreamError("there is no upstream")
        return names

    async def _names_at(self, url: str) -> list[str] | UpstreamError:
        try:
            async with asyncio.timeout(_TIMEOUT):
                cards = await self._upstream.models(url)
        except UpstreamError as error:
            return error
        except TimeoutError:
            return UpstreamError(f"does not answer /v1/models within {_TIMEOUT:.0f} s", url=url)
        names = [str(card["id"]) for card in cards if not card.get("parent") and isinstance(card.get("id"), str)]
        return names or UpstreamError("lists no base model", url=url)

    async def _in_thread(self, verb: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, verb)
