"""Which policy version serves a call: a copy of the store's policies.

A task refreshes the copy every `refresh_seconds`; if the store does not answer, the last copy stays in use.
`base_registration.py` registers the base model as version 0 of every agent. Until an agent has a live version, its
calls get 503. Trajectories keep the version that they started on. The copy belongs to the event loop's thread; the
synchronous store is called in a thread.

Agents come and go while the proxy runs (`set_agents`). The open trajectories of an agent that left go on, new ones get
404.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from ratchet.proxy.agent_names import check_agent_names, nearest_name
from ratchet.proxy.coordinator.versions.version_draws import VersionDraws
from ratchet.proxy.errors import BadRequest, NotFound, NotReady
from ratchet.proxy.runtime.critical_tasks import CriticalTasks
from ratchet.proxy.telemetry.metrics import ProxyMetrics
from ratchet.proxy.telemetry.outage_warnings import OutageWarnings, watch_store_use
from ratchet.store.errors import StoreError
from ratchet.store.records import BASE_VERSION, Policy, Prompt, VersionDraw
from ratchet.store.states import PolicyState
from ratchet.store.store import Store

log = logging.getLogger("ratchet.proxy")

_T = TypeVar("_T")

_VERSION = re.compile(r"[0-9]{1,9}")
_MIN_REFRESH_SECONDS = 0.05  # between two refreshes because of an unknown version
_FULL_REFRESH_SECONDS = 2.0  # between two reads of all versions; serving ones are read more often
_MAX_LISTED = 20  # names in an error message


class Access(NamedTuple):
    """The agents that a key may call, and the models of `model_list`; None: all."""

    agents: frozenset[str] | None = None
    models: frozenset[str] | None = None

    def has_agent(self, alias: str) -> bool:
        """Return whether the key may call an agent."""
        return self.agents is None or alias in self.agents

    def has_model(self, name: str) -> bool:
        """Return whether the key may call a model of `model_list`."""
        return self.models is None or name in self.models


FULL_ACCESS = Access()


class PolicyCache:
    """The versions of each alias. `live_versions_changed` is set whenever a live version has changed."""

    def __init__(
        self,
        aliases: Sequence[str],
        store: Store,
        metrics: ProxyMetrics,
        other_models: Iterable[str] = (),
        critical_tasks: CriticalTasks | None = None,
        refresh_seconds: float = 0.2,
    ) -> None:
        self.aliases = tuple(aliases)
        self.other_models = frozenset(other_models)  # not trained by this proxy
        self._store_has_answered = False
        self._store = store
        self._metrics = metrics
        self._refresh_seconds = refresh_seconds
        self._live: dict[str, int] = {}
        self._draws = VersionDraws(metrics)
        self._draws.set_aliases(self.aliases)
        self._joining: set[str] = set()  # agents that joined while the proxy runs, until they have a live version
        self._left: set[str] = set()  # agents that left: their open trajectories go on
        self.agents_changed = asyncio.Event()  # for the registration of version 0
        self._versions: dict[tuple[str, int], Policy] = {}  # that requests may name
        self._all_versions: dict[tuple[str, int], Policy] = {}  # rejected and pruned ones too: trajectories end on them
        self._prompts: dict[tuple[str, int], Prompt] = {}  # of the versions that have one
        self._recalled: frozenset[tuple[str, int]] = frozenset()  # whose open trajectories go on with the live one
        self._serving: list[tuple[str, int, str]] = []  # at the last refresh
        self._full_refresh_at = 0.0  # monotonic seconds
        self.live_versions_changed = asyncio.Event()
        self._refresh_lock = asyncio.Lock()
        self._critical_tasks = critical_tasks or CriticalTasks()
        self._task: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "policies")

    def set_agents(self, names: Sequence[str]) -> None:
        """Serve these agents from now on: new ones once version 0 is registered, others only to their open ends.

        Raises ValueError if the names cannot be served together; nothing has changed then.
        """
        check_agent_names(names, self.other_models)
        before, now = set(self.aliases), set(names)
        if before == now:
            return
        log.info("event=agents joined=%s left=%s", sorted(now - before), sorted(before - now))
        self.aliases = tuple(names)
        self._joining = (self._joining | (now - before)) & now
        self._left = (self._left | before) - now
        self._live = {alias: version for alias, version in self._live.items() if alias in now}
        self._draws.set_aliases(self.aliases)
        for alias in before - now:
            self._metrics.forget_agent(alias)
        self._full_refresh_at = 0.0
        self.live_versions_changed.set()
        self.agents_changed.set()

    def only_agent(self, access: Access = FULL_ACCESS) -> str:
        """Return the one agent that the caller may call, whose calls need not name it. Raises BadRequest."""
        agents = self.list_agents(access)
        if len(agents) == 1:
            return agents[0]
        names = ", ".join(agents[:_MAX_LISTED]) or "none"
        raise BadRequest(f"model: field required; the agents are {names}", param="model")

    def resolve_model(
        self, model: str, access: Access = FULL_ACCESS, *, may_have_left: bool = False
    ) -> tuple[str, int | None]:
        """Return (alias, version) of a model name; the version is None if it names none. Raises NotFound, NotReady.

        Args:
            access: what the caller's key may call.
            may_have_left: accept agents that left, for their open trajectories.
        """
        if model in self.other_models:
            if not access.has_model(model):
                raise self.unknown_model(model, access)
            return model, None
        alias, at, number = model.partition("@")
        left = may_have_left and alias in self._left
        if (alias not in self.aliases and not left) or not access.has_agent(alias):
            raise self.unknown_model(model, access)
        if alias not in self._live and not left:
            raise NotReady(f"model {alias} is not ready: no base model is known yet; is vLLM running and the store up?")
        if not at:
            return alias, None
        if not _VERSION.fullmatch(number) or (alias, int(number)) not in self._versions:
            raise self.unknown_model(model, access)
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

    def draw_version(
        self, alias: str, trajectory_id: str, unit: str | None = None, *, counted: bool = True
    ) -> tuple[int, VersionDraw | None]:
        """Return the version that a new trajectory starts on, by the shares in force, and how it was drawn.

        `unit` and `counted`: see `VersionDraws.draw`. Other models have no versions to draw from.
        """
        if alias in self.other_models:
            return BASE_VERSION, None
        return self._draws.draw(alias, trajectory_id, unit, counted=counted)

    def is_recalled(self, alias: str, version: int) -> bool:
        """Return whether the open trajectories of a rejected version go on with the live one."""
        return (alias, version) in self._recalled and alias in self._live

    def is_rejected(self, alias: str, version: int) -> bool:
        """Return whether a version was rejected while its agent has a live one."""
        known = self._all_versions.get((alias, version))
        return known is not None and known.state == PolicyState.REJECTED and alias in self._live

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

    def has_version(self, alias: str, version: int) -> bool:
        """Return whether a version is known, or the model has none."""
        return (alias, version) in self._all_versions or alias in self.other_models

    def prompt_of(self, alias: str, version: int) -> Prompt | None:
        """Return a version's prompt, or None."""
        return self._prompts.get((alias, version)) if self._prompts else None

    def list_versions(self) -> Iterable[Policy]:
        """Return every version that requests may name, by alias and version."""
        return [self._versions[key] for key in sorted(self._versions) if key[0] in self.aliases]

    def agent_states(self) -> dict[str, str]:
        """Return each agent with its state: `serving`, `waiting` for version 0, or `left`."""
        states = {alias: "serving" if alias in self._live else "waiting" for alias in self.aliases}
        return dict.fromkeys(sorted(self._left), "left") | states

    def has_left(self, alias: str) -> bool:
        """Return whether an agent starts no new trajectories, because it left."""
        return alias in self._left

    def proven_replicas(self, alias: str, version: int) -> Sequence[str]:
        """Return the URLs of the replicas that are proven to serve a version; empty: any may serve it."""
        known = self._all_versions.get((alias, version))
        return known.replicas if known else ()

    async def adapter_path(self, alias: str, version: int) -> str | None:
        """Return a version's adapter, a folder or a URL; None for the base model or if it cannot be found out."""
        known = self._all_versions.get((alias, version))
        if known is None:
            try:
                known = await self._call(lambda: self._store.policies.get(alias, version))
            except StoreError:
                return None
        return known.adapter

    def readiness_problems(self) -> list[str]:
        """Return why calls cannot be served; empty if they can, also from the last copy while the store is down."""
        missing = [f"no live version of {alias}: vLLM has not been reached yet" for alias in self.aliases
                   if alias not in self._live and alias not in self._joining]  # fmt: skip
        if not self._store_has_answered:
            missing.append("the store has not answered yet")
        return missing

    def unknown_model(self, model: str, access: Access = FULL_ACCESS) -> NotFound:
        """Return the error for a model name that the caller cannot use. It does not tell whether others can."""
        names = [*self.list_agents(access), *self.list_models(access)]
        nearest = nearest_name(model.partition("@")[0], names)
        versions = [f"{alias}@{version}" for alias, version in sorted(self._versions) if alias == nearest]
        listed = [*names[:_MAX_LISTED], *versions[-_MAX_LISTED:]]
        hint = f"did you mean {nearest!r}? " if nearest and model.partition("@")[0] != nearest else ""
        known = "does not exist" if access == FULL_ACCESS else "does not exist, or this key has no access to it"
        return NotFound(
            f"the model {model[:120]!r} {known}; {hint}there are: {', '.join(listed) or 'none'}",
            param="model",
            code="model_not_found",
        )

    def list_agents(self, access: Access = FULL_ACCESS) -> list[str]:
        """Return the agents that a key may call."""
        return [alias for alias in self.aliases if access.has_agent(alias)]

    def list_models(self, access: Access = FULL_ACCESS) -> list[str]:
        """Return the models of `model_list` that a key may call, by name."""
        return sorted(filter(access.has_model, self.other_models))

    async def start(self) -> None:
        """Start the task, after a first refresh: a warm start serves at once."""
        with contextlib.suppress(StoreError):
            await self._refresh_serving()
        self._task = self._critical_tasks.start_task(self._refresh(), "policies")

    async def stop(self) -> None:
        """Stop the task."""
        if self._task is not None:
            await self._critical_tasks.stop_tasks(self._task)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _refresh(self) -> None:
        outage = OutageWarnings(log, "policies_not_read")
        while True:
            await asyncio.sleep(self._refresh_seconds)
            try:
                with watch_store_use(self._metrics.store, "reading", outage):
                    await self._refresh_serving()
                outage.end()
            except Exception as error:  # noqa: BLE001 -- the last copy stays in use
                self._metrics.store.report("reading", ok=False)
                outage.warn(error)

    async def _refresh_serving(self) -> None:
        found = await self._call(self._store.policies.serving)
        live = {policy.alias: policy.version for policy in found
                if policy.state == PolicyState.LIVE and policy.alias in self.aliases}  # fmt: skip
        serving = [(policy.alias, policy.version, str(policy.state)) for policy in found]
        overdue = time.monotonic() - self._full_refresh_at > _FULL_REFRESH_SECONDS
        if overdue or serving != self._serving or not all(map(self._is_unchanged, found)):
            await self._refresh_all()
        self._serving = serving
        self._store_has_answered = True
        self._metrics.store.report("reading", ok=True)
        self._draws.replace(found)
        if live != self._live:
            log.info("event=live_versions %s", " ".join(f"{alias}={version}" for alias, version in live.items()))
            for alias, version in live.items():
                self._metrics.live_version.labels(alias).set(version)
            self._live = live
            self._joining -= live.keys()
            self.live_versions_changed.set()

    async def _refresh_all(self) -> None:
        began = time.monotonic()
        self._replace_policies(*await self._call(self._read_all))
        self._full_refresh_at = began

    def _is_unchanged(self, serving: Policy) -> bool:
        """Return whether a serving version is known with its current prompt and replicas, which may change."""
        known = self._all_versions.get((serving.alias, serving.version))
        return serving.alias not in self._known_aliases() or (
            known is not None and (known.prompt_id, known.replicas) == (serving.prompt_id, serving.replicas)
        )

    def _read_all(self) -> tuple[list[Policy], dict[str, Prompt]]:
        """Return all versions of the aliases, and their prompts by id. Each prompt is read once."""
        known_aliases = self._known_aliases()
        policies = [policy for policy in self._store.policies.all() if policy.alias in known_aliases]
        prompts = {prompt.id: prompt for prompt in list(self._prompts.values())}
        for name in {policy.prompt_id for policy in policies if policy.prompt_id} - prompts.keys():
            prompts[name] = self._store.prompts.get(name)
        return policies, prompts

    def _replace_policies(self, policies: Iterable[Policy], prompts: dict[str, Prompt]) -> None:
        self._all_versions = {(policy.alias, policy.version): policy for policy in policies}
        self._prompts = {
            key: prompts[policy.prompt_id] for key, policy in self._all_versions.items() if policy.prompt_id
        }
        self._recalled = frozenset(key for key, policy in self._all_versions.items() if policy.recalled_at is not None)
        self._versions = {
            key: policy
            for key, policy in self._all_versions.items()
            if policy.state not in (PolicyState.REJECTED, PolicyState.UNPROVEN) and policy.pruned_at is None
        }

    def _known_aliases(self) -> set[str]:
        """Return the agents whose versions may serve a call."""
        return self._left.union(self.aliases)

    async def refresh_now(self) -> None:
        """Read everything from the store. Raises StoreError."""
        self._full_refresh_at = 0.0
        await self._refresh_serving()

    async def _call(self, verb: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, verb)
