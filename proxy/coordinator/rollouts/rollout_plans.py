"""Rollouts by the id of their trajectory: what the tuner has written down of an attempt before it began; and resamples,
the trainer's further answers to a recorded prompt, likewise.

Each is looked up once, in a thread, and remembered; memory is bounded. An id that the store does not know is an
ordinary trajectory's. While the store does not answer, a call of a rollout that is not remembered is refused (503), so
that no attempt runs under another prompt or model than it counts for; no other call is.

A rollout belongs to the key that the tuner named, else to the first that calls; under another key its id is an
ordinary trajectory's. Belongs to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Container
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

from ratchet.proxy.errors import NotReady
from ratchet.store.access.ownership import may_share_trajectory
from ratchet.store.calls.resamples import RESAMPLE_ID_PREFIX
from ratchet.store.errors import RecordNotFound, StoreError
from ratchet.store.records import RESAMPLE
from ratchet.store.records.tuning import Prompt
from ratchet.store.store import Store

PREFIX = "roll_"
_PLANNED = (PREFIX, f"{RESAMPLE_ID_PREFIX}_")
_MOST = 20_000  # ids
_UNKNOWN_SECONDS = 5.0  # an id that is unknown now may be planned later
_PATIENCE = 5.0  # seconds for the store
_THREADS = 4
_PROMPTS = 256  # that are remembered beside the rollouts that have them


@dataclass(slots=True, frozen=True)
class RolloutPlan:
    """What a rollout's calls are served as."""

    task: str | None
    model: str | None
    purpose: str
    prompt: Prompt | None
    key_id: str | None

    @property
    def plain(self) -> bool:
        """Whether it is served as live traffic is, a canary's share included: not measured, nothing swapped in."""
        return self.purpose == "live" and self.prompt is None

    def model_for(self, asked: str, others: Container[str]) -> str:
        """Return the model that serves a call: the planned one, but where it asks for another model by its name."""
        return asked if self.model is None or asked in others else self.model

    def prompt_for(self, alias: str, others: Container[str]) -> Prompt | None:
        """Return what is swapped in for calls to an alias: nothing for models that only help with the rollout."""
        return None if alias in others and alias != self.model else self.prompt


@dataclass(slots=True)
class _Known:
    """What was found of an id. `owner` is the key that it belongs to, once that is known."""

    plan: RolloutPlan | None
    found_at: float
    owned: bool = False
    owner: str | None = None

    def is_fresh(self) -> bool:
        """Return whether the store need not be asked again."""
        return self.plan is not None or time.monotonic() - self.found_at < _UNKNOWN_SECONDS

    def plan_for(self, key_id: str | None) -> RolloutPlan | None:
        """Return the plan, if it is this key's; the first that asks has it where nobody was named."""
        if self.plan is None:
            return None
        if not self.owned:
            self.owned, self.owner = True, self.plan.key_id or key_id
        return self.plan if may_share_trajectory(self.owner, key_id) else None


class RolloutPlans:
    """The plans of rollouts."""

    def __init__(self, store: Store, most: int = _MOST) -> None:
        self._store = store
        self._most = most
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._asked: dict[str, asyncio.Future[_Known]] = {}
        self._threads = ThreadPoolExecutor(_THREADS, "rollouts")
        self._prompt = lru_cache(_PROMPTS)(store.prompts.get)  # one text for all rollouts that try it

    async def start(self) -> None:
        """Nothing to begin."""

    async def stop(self) -> None:
        """Let go of the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def find_plan(self, trajectory_id: str, key_id: str | None) -> RolloutPlan | None:
        """Return the plan of a rollout for a key; None for any other trajectory. Raises NotReady."""
        if not trajectory_id.startswith(_PLANNED):
            return None
        known = self._known.get(trajectory_id)
        if known is None or not known.is_fresh():
            known = await self._look(trajectory_id)
        return known.plan_for(key_id)

    def cached_plan(self, trajectory_id: str, key_id: str | None) -> RolloutPlan | None:
        """Return the plan of a rollout that was looked up before; never waits."""
        known = self._known.get(trajectory_id)
        return known.plan_for(key_id) if known is not None else None

    async def _look(self, name: str) -> _Known:
        """Look an id up; those who ask for the same one at the same time share one look."""
        asked = self._asked.get(name)
        if asked is None:
            loop = asyncio.get_running_loop()
            asked = self._asked[name] = loop.run_in_executor(self._threads, self._read, name)
            asked.add_done_callback(lambda done: self._take(name, done))
        try:
            return await asyncio.wait_for(asyncio.shield(asked), _PATIENCE)
        except Exception as error:  # whatever ails the store: an attempt is never served as what it may not be
            why = str(error) if isinstance(error, StoreError) else "the store does not answer"
            raise NotReady(f"rollout {name} cannot be looked up: {why}", code="rollout_unknown") from error

    def _take(self, name: str, done: asyncio.Future[_Known]) -> None:
        del self._asked[name]
        if done.cancelled() or done.exception() is not None:
            return
        self._known[name] = done.result()
        self._known.move_to_end(name)  # looked up last; a rollout is short, so the oldest is over
        while len(self._known) > self._most:
            self._known.popitem(last=False)

    def _read(self, name: str) -> _Known:
        try:
            plan = self._rollout(name) if name.startswith(PREFIX) else self._shadow(name)
        except RecordNotFound:
            plan = None
        return _Known(plan, time.monotonic())

    def _rollout(self, name: str) -> RolloutPlan:
        rollout = self._store.rollouts.get(name)
        prompt = self._prompt(rollout.prompt_id) if rollout.prompt_id else None
        return RolloutPlan(rollout.task_id, rollout.model, rollout.purpose, prompt, rollout.key_id)

    def _shadow(self, name: str) -> RolloutPlan:
        """Return a shadow's plan: the original's task and version, under its own purpose."""
        shadow = self._store.resamples.get(name)
        task = self._store.trajectories.get(shadow.original_id).task
        return RolloutPlan(task, f"{shadow.alias}@{shadow.version}", RESAMPLE, None, None)
