"""Which policy version serves a call: a copy of the store's policies.

A task refreshes the copy every `refresh_seconds`; if the store does not answer, the last copy stays in use. At start
another task asks the replicas for the base model and registers it. Until an alias has a live version, calls get 503.
Trajectories keep the version that they started on. The copy belongs to the event loop's thread; the synchronous store
is called in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from ratchet.proxy.coordinator.versions.canary_choice import CanaryChoice
from ratchet.proxy.errors import NotFound, NotReady, UpstreamError
from ratchet.proxy.runtime.critical_tasks import CriticalTasks
from ratchet.proxy.telemetry.metrics import ProxyMetrics
from ratchet.proxy.upstreams.vllm_client import Upstream
from ratchet.store.errors import StoreError
from ratchet.store.records import BASE_VERSION, Policy
from ratchet.store.records.tuning import Prompt
from ratchet.store.states import PolicyState
from ratchet.store.store import Store

log = logging.getLogger("ratchet.proxy")

_T = TypeVar("_T")

_VERSION = re.compile(r"[0-9]{1,9}")
_MIN_REFRESH_SECONDS = 0.05  # between two refreshes because of an unknown version
_FULL_REFRESH_SECONDS = 2.0  # between two reads of all versions; serving ones are read more often


class PolicyCache:
    """The versions of each alias. `live_versions_changed` is set whenever a live version has changed."""

    def __init__(
        self,
        aliases: Sequence[str],
        store: Store,
        upstream: Upstream,
        metrics: ProxyMetrics,
        other_models: Iterable[str] = (),
        critical_tasks: CriticalTasks | None = None,
        refresh_seconds: float = 0.2,
    ) -> None:
        self.aliases = tuple(aliases)
        self.other_models = frozenset(other_models)  # not trained by this proxy
        self._store_answered_at = 0.0  # monotonic seconds
        self._store = store
        self._upstream = upstream
        self._metrics = metrics
        self._refresh_seconds = refresh_seconds
        self._live: dict[str, int] = {}
        self._canary_choice = CanaryChoice(self.aliases, metrics)
        self._versions: dict[tuple[str, int], Policy] = {}  # that requests may name
        self._all_versions: dict[tuple[str, int], Policy] = {}  # rejected and pruned ones too: trajectories end on them
        self._prompts: dict[tuple[str, int], Prompt] = {}  # of the versions that have one
        self._full_refresh_at = 0.0  # monotonic seconds
        self.live_versions_changed = asyncio.Event()
        self._refresh_lock = asyncio.Lock()
        self._critical_tasks = critical_tasks or CriticalTasks()
        self._tasks: list[asyncio.Task[None]] = []
        self._thread = ThreadPoolExecutor(1, "policies")

    def resolve_model(self, model: str) -> tuple[str, int | None]:
        """Return (alias, version) of a model name; the version is None if it names none. Raises NotFound, NotReady."""
        if model in self.other_models:
            return model, None
        alias, at, number = model.partition("@")
        if alias not in self.aliases:
            raise self._unknown(model)
        if alias not in self._live:
            raise NotReady(f"model {alias} is not ready: no base model is known yet; is vLLM running and the store up?")
        if not at:
            return alias, None
        if not _VERSION.fullmatch(number) or (alias, int(number)) not in self._versions:
            raise self._unknown(model)
        return alias, int(number)

    async def refresh_if_unknown(self, model: str) -> None:
        """Refresh at once if a model name has an unknown version, which may be new.

        Concurrent requests share a refresh, and refreshes are `_MIN_REFRESH_SECONDS` apart: invented names cost little.
        """
        alias, at, number = model.partition("@")
        if not at or alias not in self.aliases or not _VERSION.fullmatch(number):
            return
        requested_at = time.monotonic()
        async with self._refresh_lock:
            if (alias, int(number)) in self._versions or self._full_refresh_at > requested_at:
                return
            await asyncio.sleep(self._full_refresh_at + _MIN_REFRESH_SECONDS - time.monotonic())
            with contextlib.suppress(StoreError):  # the version stays unknown
                await self._refresh_all()

    def version_for_new_trajectory(self, alias: str, trajectory_id: str) -> int:
        """Return the version that a new trajectory starts on: the canary for its share of them, else the live one."""
        live_version = self.live_version(alias)
        if alias in self.other_models:
            return live_version
        return self._canary_choice.choose_version(alias, trajectory_id, live_version)

    def live_versions(self) -> dict[str, int]:
        """Return the live version of each alias that has one."""
        return dict(self._live)

    def live_version(self, alias: str) -> int:
        """Return the live version of a known alias; 0 for other models."""
        return BASE_VERSION if alias in self.other_models else self._live[alias]

    def served_name(self, alias: str, version: int) -> str:
        """Return a version's model name in vLLM."""
        known = self._all_versions.get((alias, version))
        return known.served_name if known else f"{alias}@{version}"

    def prompt_of(self, alias: str, version: int) -> Prompt | None:
        """Return a version's prompt, or None."""
        return self._prompts.get((alias, version)) if self._prompts else None

    def list_versions(self) -> Iterable[Policy]:
        """Return every version that requests may name, by alias and version."""
        return [self._versions[key] for key in sorted(self._versions)]

    async def adapter_path(self, alias: str, version: int) -> str | None:
        """Return a version's adapter folder; None for the base model or if it cannot be found out."""
        known = self._all_versions.get((alias, version))
        if known is None:
            try:
                known = await self._call(lambda: self._store.policies.get(alias, version))
            except StoreError:
                return None
        return known.adapter

    def readiness_problems(self) -> list[str]:
        """Return why calls cannot be served; empty if they can."""
        missing = [f"no live version of {alias}: vLLM has not been reached yet" for alias in self.aliases
                   if alias not in self._live]  # fmt: skip
        if time.monotonic() - self._store_answered_at > 5.0:
            missing.append("the store does not answer")
        return missing

    def _unknown(self, model: str) -> NotFound:
        versions = (f"{p.alias}@{p.version}" for p in self.list_versions())
        exist = ", ".join([*self.aliases, *sorted(self.other_models), *versions])
        return NotFound(
            f"the model {model[:120]!r} does not exist; there are: {exist}", param="model", code="model_not_found"
        )

    async def start(self) -> None:
        """Start the tasks, after a first refresh: a warm start serves at once."""
        with contextlib.suppress(StoreError):
            await self._refresh_serving()
        self._tasks = [
            self._critical_tasks.start_task(work(), name)
            for name, work in (
                ("policies", self._refresh),
                ("discover", self._discover),
            )
        ]

    async def stop(self) -> None:
        """Stop the tasks."""
        await self._critical_tasks.stop_tasks(*self._tasks)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(self._refresh_seconds)
            try:
                await self._refresh_serving()
            except Exception as error:  # noqa: BLE001 -- the last copy stays in use
                self._metrics.store.report("reading", ok=False)
                log.warning("event=policies_not_read reason=%r", str(error))

    async def _refresh_serving(self) -> None:
        found = await self._call(self._store.policies.serving)
        live = {policy.alias: policy.version for policy in found
                if policy.state == PolicyState.LIVE and policy.alias in self.aliases}  # fmt: skip
        if not all(map(self._is_unchanged, found)) or time.monotonic() - self._full_refresh_at > _FULL_REFRESH_SECONDS:
            await self._refresh_all()
        self._store_answered_at = time.monotonic()
        self._metrics.store.report("reading", ok=True)
        self._canary_choice.replace(policy for policy in found if policy.state == PolicyState.CANARY)
        if live != self._live:
            log.info("event=live_versions %s", " ".join(f"{alias}={version}" for alias, version in live.items()))
            for alias, version in live.items():
                self._metrics.live_version.labels(alias).set(version)
            self._live = live
            self.live_versions_changed.set()

    async def _refresh_all(self) -> None:
        began = time.monotonic()
        self._replace_policies(*await self._call(self._read_all))
        self._full_refresh_at = began

    def _is_unchanged(self, serving: Policy) -> bool:
        """Return whether a serving version is known with its current prompt; a candidate's prompt may change."""
        known = self._all_versions.get((serving.alias, serving.version))
        return serving.alias not in self.aliases or (known is not None and known.prompt_id == serving.prompt_id)

    def _read_all(self) -> tuple[list[Policy], dict[str, Prompt]]:
        """Return all versions of the aliases, and their prompts by id. Each prompt is read once."""
        policies = [policy for policy in self._store.policies.all() if policy.alias in self.aliases]
        prompts = {prompt.id: prompt for prompt in list(self._prompts.values())}
        for name in {policy.prompt_id for policy in policies if policy.prompt_id} - prompts.keys():
            prompts[name] = self._store.prompts.get(name)
        return policies, prompts

    def _replace_policies(self, policies: Iterable[Policy], prompts: dict[str, Prompt]) -> None:
        self._all_versions = {(policy.alias, policy.version): policy for policy in policies}
        self._prompts = {
            key: prompts[policy.prompt_id] for key, policy in self._all_versions.items() if policy.prompt_id
        }
        self._versions = {
            key: policy
            for key, policy in self._all_versions.items()
            if policy.state not in (PolicyState.REJECTED, PolicyState.UNPROVEN) and policy.pruned_at is None
        }

    async def _discover(self) -> None:
        """Find the base model and register it; retry until both a replica and the store answer."""
        last_error = ""
        while True:
            try:
                base = await self._base_model()
                for alias in self.aliases:
                    await self._call(partial(self._store.policies.register_base, alias, base))
                self._full_refresh_at = 0.0
                await self._refresh_serving()
                return
            except Exception as error:  # noqa: BLE001 -- retried until both answer
                if str(error) != last_error:
                    last_error = str(error)
                    log.warning("event=base_model_not_found reason=%r", last_error)
            await asyncio.sleep(0.5)

    async def _base_model(self) -> str:
        """Return the served name of the model that is not an adapter. Raises UpstreamError."""
        first_error: UpstreamError | None = None
        for url in self._upstream.urls:
            try:
                cards = await self._upstream.models(url)
            except UpstreamError as error:
                first_error = first_error or error
                continue
            for card in cards:
                if not card.get("parent") and isinstance(card.get("id"), str):
                    return str(card["id"])
            first_error = first_error or UpstreamError(f"upstream {url} lists no base model")
        raise first_error or UpstreamError("there is no upstream")

    async def _call(self, verb: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, verb)
