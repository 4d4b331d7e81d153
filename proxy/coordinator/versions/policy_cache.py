"""Which policy version serves: the proxy's copy of the store's policies, and its word on what it still needs.

Two tasks: one renews the copy every `refresh_seconds` (a store that does not answer leaves the last copy in use),
the other tells the store about once a second, and at once after a change, which versions are live here and how many
trajectories hold each. What it tells was true at one moment: live versions and pins are read together.

A canary gets its share of the new trajectories by their ids; those that it got keep it, as any version is kept.

At start it asks the replicas for the base model and registers it; until an alias has a live version, calls get 503.
The copy belongs to the event loop's thread; each task has a thread of its own for the synchronous store.
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
from hashlib import blake2b
from typing import TypeVar

from ratchet.proxy.errors import NotFound, NotReady, UpstreamError
from ratchet.proxy.runtime.critical_tasks import CriticalTasks
from ratchet.proxy.telemetry.metrics import Metrics
from ratchet.proxy.upstreams.vllm_client import Upstream
from ratchet.store.errors import StoreError
from ratchet.store.ids import new_id
from ratchet.store.records import BASE_VERSION, Policy, ProxyInstance
from ratchet.store.records.tuning import Prompt
from ratchet.store.states import PolicyState
from ratchet.store.store import Store

log = logging.getLogger("ratchet.proxy")

_T = TypeVar("_T")

_VERSION = re.compile(r"[0-9]{1,9}")
_NEWS_EVERY = 0.05  # seconds between looks because of a version that is asked for and not known
_ALL_EVERY = 2.0  # seconds between looks at all versions; the live ones are looked at more often


class PolicyCache:
    """The versions of each alias, and the beat of this instance.

    At a given time `pins` says how many trajectories hold each version, and `shipped_until` before which moment
    everything recorded is in the store.
    """

    def __init__(
        self,
        aliases: Sequence[str],
        store: Store,
        upstream: Upstream,
        metrics: Metrics,
        url: str,
        pins: Callable[[float], dict[str, int]],
        shipped_until: Callable[[float], float],
        others: Iterable[str] = (),
        critical_tasks: CriticalTasks | None = None,
        refresh_seconds: float = 0.2,
        heartbeat_seconds: float = 1.0,
    ) -> None:
        self.aliases = tuple(aliases)
        self.other_models = frozenset(others)  # models that are not trained here
        self.heard_at = 0.0  # when the store answered last, monotonic seconds
        self._store = store
        self._upstream = upstream
        self._metrics = metrics
        self._instance_id = new_id("proxy")
        self._url = url
        self._pins = pins
        self._shipped_until = shipped_until
        self._refresh_seconds = refresh_seconds
        self._heartbeat_seconds = heartbeat_seconds
        self._live: dict[str, int] = {}
        self._canaries: dict[str, Policy] = {}
        for alias in self.aliases:
            metrics.canary_share.labels(alias).set(0.0)
        self._versions: dict[tuple[str, int], Policy] = {}  # that can be asked for
        self._every: dict[tuple[str, int], Policy] = {}  # rejected and pruned ones, too: trajectories finish on them
        self._prompts: dict[tuple[str, int], Prompt] = {}  # of the versions that have one
        self._all_at = 0.0
        self._changed = asyncio.Event()
        self._news = asyncio.Lock()
        self._critical_tasks = critical_tasks or CriticalTasks()
        self._tasks: list[asyncio.Task[None]] = []
        self._threads = [ThreadPoolExecutor(1, name) for name in ("policies", "beat")]

    # --- questions of the hot path ----------------------------------------------------------------------------

    def resolve_model(self, model: str) -> tuple[str, int | None]:
        """Return (alias, version asked for) of a model name. Raises NotFound, NotReady."""
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
        """Look in the store at once where a version is asked for by name that is not known here: it may be new.

        Those who ask at the same time share a look, and looks are `_NEWS_EVERY` apart, whoever makes names up.
        """
        alias, at, number = model.partition("@")
        if not at or alias not in self.aliases or not _VERSION.fullmatch(number):
            return
        came = time.monotonic()
        async with self._news:
            if (alias, int(number)) in self._versions or self._all_at > came:
                return
            await asyncio.sleep(self._all_at + _NEWS_EVERY - time.monotonic())
            with contextlib.suppress(StoreError):  # then it is as unknown as before
                await self._refresh_all()

    def version_for_new_trajectory(self, alias: str, trajectory_id: str) -> int:
        """Return the version that a new trajectory begins on: the canary for its share of them, else the live one.

        Which ones a canary gets is told by the trajectory's id alone, and a larger share keeps those of a smaller.
        """
        canary = self._canaries.get(alias)
        if canary is None or alias in self.other_models:
            return self.live_version(alias)
        chosen = (
            canary.version if _place(canary, trajectory_id) < (canary.canary_share or 0.0) else self.live_version(alias)
        )
        self._metrics.canary_trajectories.labels(alias, "canary" if chosen == canary.version else "live").inc()
        return chosen

    def live_version(self, alias: str) -> int:
        """Return the version that new trajectories of a known alias begin on; 0 of a model that is not ours."""
        return BASE_VERSION if alias in self.other_models else self._live[alias]

    def served_name(self, alias: str, version: int) -> str:
        """Return the name that vLLM knows a version by."""
        known = self._every.get((alias, version))
        return known.served_name if known else f"{alias}@{version}"

    def prompt_of(self, alias: str, version: int) -> Prompt | None:
        """Return the prompt that a version has."""
        return self._prompts.get((alias, version)) if self._prompts else None

    def list_versions(self) -> Iterable[Policy]:
        """Return every version that can be asked for, by alias and version."""
        return [self._versions[key] for key in sorted(self._versions)]

    async def adapter_path(self, alias: str, version: int) -> str | None:
        """Return the adapter folder of a version; None for the base model or where nobody knows it."""
        known = self._every.get((alias, version))
        if known is None:
            try:
                known = await self._ask(0, lambda: self._store.policies.get(alias, version))
            except StoreError:
                return None
        return known.adapter

    def readiness_problems(self) -> list[str]:
        """Return what is missing before calls can be served; empty when nothing is."""
        missing = [f"no live version of {alias}: vLLM has not been reached yet" for alias in self.aliases
                   if alias not in self._live]  # fmt: skip
        if time.monotonic() - self.heard_at > 5.0:
            missing.append("the store does not answer")
        return missing

    def _unknown(self, model: str) -> NotFound:
        versions = (f"{p.alias}@{p.version}" for p in self.list_versions())
        exist = ", ".join([*self.aliases, *sorted(self.other_models), *versions])
        return NotFound(
            f"the model {model[:120]!r} does not exist; there are: {exist}", param="model", code="model_not_found"
        )

    # --- the two tasks ----------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin both tasks; the first look is waited for, so that a warm start serves at once."""
        with contextlib.suppress(StoreError):
            await self._look()
        self._tasks = [
            self._critical_tasks.start_task(work(), name)
            for name, work in (
                ("policies", self._refresh),
                ("discover", self._discover),
                ("beat", self._send_heartbeats),
            )
        ]

    async def stop(self) -> None:
        """End the tasks and tell the store that this instance is closed."""
        await self._critical_tasks.stop_tasks(*self._tasks)
        try:
            await asyncio.wait_for(self._ask(1, lambda: self._store.proxy_instances.remove(self._instance_id)), 2.0)
        except (StoreError, TimeoutError) as error:
            log.warning("event=door_not_closed reason=%r", str(error))
        for thread in self._threads:
            thread.shutdown(wait=False, cancel_futures=True)

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(self._refresh_seconds)
            try:
                await self._look()
            except Exception as error:  # noqa: BLE001 -- whatever ails the store, the last copy stays in use
                self._metrics.store.report("reading", ok=False)
                log.warning("event=policies_not_read reason=%r", str(error))

    async def _look(self) -> None:
        found = await self._ask(0, self._store.policies.serving)
        live = {policy.alias: policy.version for policy in found
                if policy.state == PolicyState.LIVE and policy.alias in self.aliases}  # fmt: skip
        if not all(map(self._is_unchanged, found)) or time.monotonic() - self._all_at > _ALL_EVERY:
            await self._refresh_all()
        self.heard_at = time.monotonic()
        self._metrics.store.report("reading", ok=True)
        self._replace_canaries(policy for policy in found if policy.state == PolicyState.CANARY)
        if live != self._live:
            log.info("event=live_versions %s", " ".join(f"{alias}={version}" for alias, version in live.items()))
            for alias, version in live.items():
                self._metrics.live_version.labels(alias).set(version)
            self._live = live
            self._changed.set()

    async def _refresh_all(self) -> None:
        began = time.monotonic()
        self._replace_policies(*await self._ask(0, self._read_all))
        self._all_at = began

    def _is_unchanged(self, serving: Policy) -> bool:
        """Return whether a version that serves is known, with its prompt: a candidate's may have changed."""
        known = self._every.get((serving.alias, serving.version))
        return serving.alias not in self.aliases or (known is not None and known.prompt_id == serving.prompt_id)

    def _read_all(self) -> tuple[list[Policy], dict[str, Prompt]]:
        """Return every version of the aliases, and their prompts by id; a prompt is read once."""
        policies = [policy for policy in self._store.policies.all() if policy.alias in self.aliases]
        prompts = {prompt.id: prompt for prompt in list(self._prompts.values())}
        for name in {policy.prompt_id for policy in policies if policy.prompt_id} - prompts.keys():
            prompts[name] = self._store.prompts.get(name)
        return policies, prompts

    def _replace_policies(self, policies: Iterable[Policy], prompts: dict[str, Prompt]) -> None:
        self._every = {(policy.alias, policy.version): policy for policy in policies}
        self._prompts = {key: prompts[policy.prompt_id] for key, policy in self._every.items() if policy.prompt_id}
        self._versions = {
            key: policy
            for key, policy in self._every.items()
            if policy.state not in (PolicyState.REJECTED, PolicyState.UNPROVEN) and policy.pruned_at is None
        }

    def _replace_canaries(self, found: Iterable[Policy]) -> None:
        canaries = {policy.alias: policy for policy in found if policy.alias in self.aliases}
        for alias in self.aliases:
            policy, before = canaries.get(alias), self._canaries.get(alias)
            if (policy and (policy.version, policy.canary_share)) == (before and (before.version, before.canary_share)):
                continue
            share = (policy.canary_share if policy else None) or 0.0
            version = policy.version if policy else None
            log.info("event=canary alias=%s version=%s share=%g", alias, version, share)
            self._metrics.canary_share.labels(alias).set(share)
        self._canaries = canaries

    async def _discover(self) -> None:
        """Find the base model and register it, trying until both the replica and the store answer."""
        told = ""
        while True:
            try:
                base = await self._base_model()
                for alias in self.aliases:
                    await self._ask(0, partial(self._store.policies.register_base, alias, base))
                self._all_at = 0.0
                await self._look()
                return
            except Exception as error:  # noqa: BLE001 -- tried again until both answer
                if str(error) != told:
                    told = str(error)
                    log.warning("event=base_model_not_found reason=%r", told)
            await asyncio.sleep(0.5)

    async def _base_model(self) -> str:
        """Return the served name of the model that is nobody's adapter. Raises UpstreamError."""
        told: UpstreamError | None = None
        for url in self._upstream.urls:
            try:
                cards = await self._upstream.models(url)
            except UpstreamError as error:
                told = told or error
                continue
            for card in cards:
                if not card.get("parent") and isinstance(card.get("id"), str):
                    return str(card["id"])
            told = told or UpstreamError(f"upstream {url} lists no base model")
        raise told or UpstreamError("there is no upstream")

    async def _send_heartbeats(self) -> None:
        while True:
            self._changed.clear()
            now = time.time()
            instance = ProxyInstance(
                id=self._instance_id,
                url=self._url,
                live_versions=dict(self._live),
                pinned_trajectories=self._pins(now),
                shipped_until=self._shipped_until(now),
                heartbeat_at=now,
            )
            try:
                await self._ask(1, partial(self._store.proxy_instances.heartbeat, instance))
                self._metrics.store.report("writing", ok=True)
            except Exception as error:  # noqa: BLE001 -- as above; the next beat says it all again
                self._metrics.store.report("writing", ok=False)
                log.warning("event=beat_failed reason=%r", str(error))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), self._heartbeat_seconds)

    async def _ask(self, thread: int, verb: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads[thread], verb)


def _place(canary: Policy, trajectory_id: str) -> float:
    """Return where a trajectory stands among all, from 0 to 1; another canary shuffles them anew."""
    name = f"{canary.alias}@{canary.version}\0{trajectory_id}"
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest()) / 2**64
