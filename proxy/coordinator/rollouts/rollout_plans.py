"""The plans of rollouts, by trajectory id: task, model and prompt, which the tuner stores before a rollout starts.

Resamples, which the trainer plans, are found in the same way.

A plan is looked up once, in a thread, and cached; the cache is bounded. An id that the store does not know is that of
an ordinary trajectory. While the store is down, calls of rollouts that are not cached are rejected (503), because they
would run with the wrong prompt or model; no other call is.

A rollout belongs to the key that the tuner named, else to the first key that calls; for another key its id is that of
an ordinary trajectory. All state belongs to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Container
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

from ratchet.proxy.errors import not_looked_up
from ratchet.store import ids
from ratchet.store.errors import RecordNotFound
from ratchet.store.ids import may_share_trajectory
from ratchet.store.records import RESAMPLE, Prompt
from ratchet.store.store import Store

PREFIX = f"{ids.ROLLOUT}_"
_MAX_IDS = 20_000
_UNKNOWN_SECONDS = 5.0  # until an unknown id, which may be planned later, is looked up again
_TIMEOUT = 5.0  # seconds for the store
_THREADS = 4
_MAX_PROMPTS = 256  # cached


@dataclass(slots=True, frozen=True)
class RolloutPlan:
    """How the calls of a rollout are served."""

    task: str | None
    model: str | None
    purpose: str
    prompt: Prompt | None
    key_id: str | None
    alias: str | None = None  # the agent that the tuner works on

    @property
    def plain(self) -> bool:
        """Whether it is served like live traffic, ramps included: it is not an evaluation and has no prompt."""
        return self.purpose == "live" and self.prompt is None

    def is_helper(self, model: str, others: Container[str], agents: Container[str]) -> bool:
        """Return whether a call requests a model that the rollout only uses: one of `others`, or another agent."""
        alias = model if model in others else model.partition("@")[0]
        if self.model is not None and alias == (self.model if self.model in others else self.model.partition("@")[0]):
            return False
        return alias in others or (self.alias is not None and alias in agents and alias != self.alias)


@dataclass(slots=True)
class _CachedPlan:
    """A cached look-up. `owner` is the key that the rollout belongs to, once known."""

    plan: RolloutPlan | None
    looked_up_at: float
    owned: bool = False
    owner: str | None = None

    def is_fresh(self) -> bool:
        """Return whether no new look-up is necessary."""
        return self.plan is not None or time.monotonic() - self.looked_up_at < _UNKNOWN_SECONDS

    def plan_for(self, key_id: str | None) -> RolloutPlan | None:
        """Return the plan if it belongs to this key; without a named key it belongs to the first caller."""
        if self.plan is None:
            return None
        if not self.owned:
            self.owned, self.owner = True, self.plan.key_id or key_id
        return self.plan if may_share_trajectory(self.owner, key_id) else None


class RolloutPlans:
    """The plans of rollouts."""

    def __init__(self, store: Store, max_ids: int = _MAX_IDS) -> None:
        self._store = store
        self._max_ids = max_ids
        self._cache: OrderedDict[str, _CachedPlan] = OrderedDict()
        self._pending: dict[str, asyncio.Future[_CachedPlan]] = {}
        self._threads = ThreadPoolExecutor(_THREADS, "rollouts")
        self._prompt = lru_cache(_MAX_PROMPTS)(store.prompts.get)  # rollouts with the same prompt share one object
        self._tuning = lru_cache(_MAX_PROMPTS)(store.tunings.get)

    async def start(self) -> None:
        """Nothing to start."""

    async def stop(self) -> None:
        """Stop the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def find_plan(self, trajectory_id: str, key_id: str | None) -> RolloutPlan | None:
        """Return the plan of a rollout for a key; None for any other trajectory. Raises NotReady."""
        if not ids.is_planned(trajectory_id):
            return None
        known = self._cache.get(trajectory_id)
        if known is None or not known.is_fresh():
            known = await self._look_up(trajectory_id)
        return known.plan_for(key_id)

    def cached_plan(self, trajectory_id: str, key_id: str | None) -> RolloutPlan | None:
        """Return the plan of a rollout that was looked up before; never waits."""
        known = self._cache.get(trajectory_id)
        return known.plan_for(key_id) if known is not None else None

    async def _look_up(self, name: str) -> _CachedPlan:
        """Look up an id; concurrent callers share one look-up."""
        pending = self._pending.get(name)
        if pending is None:
            loop = asyncio.get_running_loop()
            pending = self._pending[name] = loop.run_in_executor(self._threads, self._read, name)
            pending.add_done_callback(lambda done: self._on_done(name, done))
        try:
            return await asyncio.wait_for(asyncio.shield(pending), _TIMEOUT)
        except Exception as error:  # for any failure: a rollout is never served without its plan
            raise not_looked_up(f"rollout {name}", error, code="rollout_unknown") from error

    def _on_done(self, name: str, done: asyncio.Future[_CachedPlan]) -> None:
        del self._pending[name]
        if done.cancelled() or done.exception() is not None:
            return
        self._cache[name] = done.result()
        self._cache.move_to_end(name)  # rollouts are short: the oldest has ended
        while len(self._cache) > self._max_ids:
            self._cache.popitem(last=False)

    def _read(self, name: str) -> _CachedPlan:
        try:
            plan = self._rollout(name) if name.startswith(PREFIX) else self._resample(name)
        except RecordNotFound:
            plan = None
        return _CachedPlan(plan, time.monotonic())

    def _rollout(self, name: str) -> RolloutPlan:
        rollout = self._store.rollouts.get(name)
        prompt = self._prompt(rollout.prompt_id) if rollout.prompt_id else None
        alias = self._tuning(rollout.tuning_id).alias
        return RolloutPlan(rollout.task_id, rollout.model, rollout.purpose, prompt, rollout.key_id, alias)

    def _resample(self, name: str) -> RolloutPlan:
        """Return a resample's plan: the task and version of the original trajectory."""
        resample = self._store.resamples.get(name)
        task = self._store.trajectories.get(resample.original_id).task
        return RolloutPlan(task, f"{resample.alias}@{resample.version}", RESAMPLE, None, None, resample.alias)
