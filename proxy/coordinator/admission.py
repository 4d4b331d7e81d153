"""Admission: decides, once per call, its trajectory, parent answer, policy version, task, purpose and prompt.

The one place where rollout plans, policy versions and linking meet. `resolve` waits only for the plan of a named
rollout and for a version that is not cached yet; from the choice of the version on it does not suspend, so that
concurrent calls of one trajectory see each other.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from hashlib import blake2b

import msgspec

from ratchet.proxy.coordinator.conversations.token_contexts import TokenContexts
from ratchet.proxy.coordinator.linking.linker import TrajectoryLinker
from ratchet.proxy.coordinator.rollouts.rollout_plans import PREFIX, RolloutPlan, RolloutPlans
from ratchet.proxy.coordinator.versions.policy_cache import PolicyCache
from ratchet.proxy.dialects.dialect import ParsedRequest
from ratchet.proxy.messages.link_records import AttemptKey, CallIdentity, Leaf, LinkEvidence, Placement
from ratchet.store.records import CallEnded, CallStarted
from ratchet.store.records.tuning import Prompt

_NOT_IN_ID = re.compile(r"[^A-Za-z0-9._:~@+=-]")
_MAX_ID = 128  # characters


class Admission:
    """Places calls when they begin, and updates linking when they end."""

    def __init__(
        self, policies: PolicyCache, linker: TrajectoryLinker, rollouts: RolloutPlans, contexts: TokenContexts | None
    ) -> None:
        self._policies = policies
        self._linker = linker
        self._rollouts = rollouts
        self._contexts = contexts

    async def resolve(self, parsed: ParsedRequest, identity: CallIdentity, key_id: str | None) -> Placement:
        """Return the placement of a call, and open the call in linking. Raises NotFound, NotReady.

        Each returned placement needs one `end_call`.
        """
        plan = await self._rollouts.find_plan(identity.trajectory, key_id) if identity.trajectory else None
        model = parsed.request.model
        if plan is not None:
            model = plan.model_for(model, self._policies.other_models)
        if "@" in model:
            await self._policies.refresh_if_unknown(model)
        alias, requested = self._policies.resolve_model(model)
        now = time.time()
        attempt = AttemptKey(key_id, parsed.nodes[-1].hash if parsed.nodes else "", parsed.request.tools_hash)
        link = self._linker.find_link(self._evidence(parsed, identity, plan, alias, requested, attempt, now))
        version = requested if link.version is None else link.version
        if version is None:
            version = self._first_version(alias, link.trajectory_id, plan)
        link = msgspec.structs.replace(link, version=version)
        self._linker.begin_call(link, alias, version, now)
        if plan is None and link.trajectory_id.startswith(PREFIX):  # linked to a rollout by its messages
            plan = self._rollouts.cached_plan(link.trajectory_id, key_id)
        task = plan.task if plan else identity.task
        return Placement(alias, version, link, attempt, now, task, self._prompt(alias, version, plan))

    def end_call(
        self, placement: Placement, record: CallEnded | None, leaves: Iterable[Leaf], now: float, *, retryable: bool
    ) -> None:
        """Close a call: its answers can be continued; a retryable attempt can be repeated."""
        self._linker.end_call(placement.link, leaves, now)
        if self._contexts is not None and record is not None:
            self._contexts.add_answers(record)
        if retryable:
            self._linker.add_unanswered(placement.link, placement.attempt, now)

    def mark_unanswered(self, placement: Placement) -> None:
        """Record that the answer of an ended call did not reach its client, which may retry."""
        self._linker.add_unanswered(placement.link, placement.attempt, time.time())

    def task_family(self, start: CallStarted) -> str:
        """Return the task family of a call's trajectory."""
        return self._linker.task_family(start)

    def _evidence(
        self,
        parsed: ParsedRequest,
        identity: CallIdentity,
        plan: RolloutPlan | None,
        alias: str,
        requested: int | None,
        attempt: AttemptKey,
        now: float,
    ) -> LinkEvidence:
        request, explicit = parsed.request, identity.trajectory
        is_other = alias in self._policies.other_models
        # If a rollout runs on another model, the named trajectory is that model's. Else the other model only helps.
        if is_other and explicit is not None and not (plan and plan.model == alias):
            explicit = other_model_trajectory_id(explicit, alias)
        return LinkEvidence(
            alias=alias,
            version=requested,
            messages=request.messages,
            keys=parsed.keys,
            key_id=attempt.key_id,
            explicit=explicit,
            explicit_by=identity.named_by,
            follows=request.follows[1] if request.follows else None,
            attempt=attempt,
            is_retry=identity.is_retry,
            arrived_at=now,
            is_other_model=is_other,
            planned_purpose=plan.purpose if plan else None,
        )

    def _first_version(self, alias: str, trajectory_id: str, plan: RolloutPlan | None) -> int:
        """Return the version of a new trajectory. Measured rollouts start on the live version, never on a canary."""
        if plan is None or plan.plain:
            return self._policies.version_for_new_trajectory(alias, trajectory_id)
        return self._policies.live_version(alias)

    def _prompt(self, alias: str, version: int, plan: RolloutPlan | None) -> Prompt | None:
        """Return the rollout's prompt, else the version's."""
        prompt = plan.prompt_for(alias, self._policies.other_models) if plan else None
        return prompt or self._policies.prompt_of(alias, version)


def other_model_trajectory_id(trajectory_id: str, model: str) -> str:
    """Return the id for the calls of another model within a trajectory: a trajectory has one alias."""
    name = f"{trajectory_id}~{_NOT_IN_ID.sub('_', model)}"
    return name if len(name) <= _MAX_ID else f"{trajectory_id}~{blake2b(model.encode(), digest_size=8).hexdigest()}"
