"""Admission: decides, once per call, its trajectory, parent answer, policy version, task, purpose and prompt.

The one place where rollout plans, policy versions and linking meet. `resolve` waits only for the plan of a named
rollout and for a version that is not cached yet; from the choice of the version on it does not suspend, so that
concurrent calls of one trajectory see each other.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from ratchet.proxy.coordinator.conversations.token_contexts import TokenContexts
from ratchet.proxy.coordinator.linking.linker import TrajectoryLinker
from ratchet.proxy.coordinator.linking.open_trajectories import name_of_other_agent
from ratchet.proxy.coordinator.rollouts.rollout_plans import PREFIX, RolloutPlan, RolloutPlans
from ratchet.proxy.coordinator.versions.policy_cache import Access, PolicyCache
from ratchet.proxy.coordinator.versions.version_draws import unit_of
from ratchet.proxy.messages.admission_records import AdmissionRequest
from ratchet.proxy.messages.link_records import AttemptKey, CallIdentity, Leaf, Link, LinkEvidence, Placement
from ratchet.store.ids import new_id
from ratchet.store.records import MOVED, UNLINKED, CallEnded, CallStarted, VersionDraw

_REPEATED = ("retry", "resend")
_NOT_TRAINED = "eval"  # the purpose of other agents' calls in a rollout


class Admission:
    """Places calls when they begin, and updates linking when they end."""

    def __init__(
        self, policies: PolicyCache, linker: TrajectoryLinker, rollouts: RolloutPlans, contexts: TokenContexts | None
    ) -> None:
        self._policies = policies
        self._linker = linker
        self._rollouts = rollouts
        self._contexts = contexts

    async def resolve(self, request: AdmissionRequest) -> Placement:
        """Return the placement of a call, and open the call in linking. Raises NotFound, NotReady, MessagesNeeded.

        Each returned placement needs one `end_call`.
        """
        identity, key_id, access = request.identity, request.key_id, Access(request.agents, request.models)
        plan = await self._rollouts.find_plan(identity.trajectory, key_id) if identity.trajectory else None
        model, is_helper = planned_model(request.model, plan, self._policies)
        if "@" in model:
            await self._policies.refresh_if_unknown(model)
        alias, requested = self._policies.resolve_model(model, access, may_have_left=True)
        now = time.time()
        attempt = AttemptKey(alias, key_id, request.prompt_node, request.tools_hash)
        link = self._linker.find_link(
            self._evidence(request, plan, alias, requested, attempt, now, is_helper=is_helper)
        )
        if link.version is None and self._policies.has_left(alias):
            raise self._policies.unknown_model(model, access)
        if link.version is not None and self._policies.is_recalled(alias, link.version):
            link = self._moved(link, alias)
        elif link.linked_by in _REPEATED and self._never_answers(link, alias):
            link = Link(new_id("traj"), None, "root", purpose=link.purpose, key_id=key_id)
        version, draw = requested if link.version is None else link.version, None
        if version is None:
            version, draw = self._first_version(alias, link, plan, identity)
        link = msgspec.structs.replace(link, version=version)
        self._linker.begin_call(link, alias, version, now)
        if plan is None and link.trajectory_id.startswith(PREFIX):  # linked to a rollout by its messages
            plan = self._rollouts.cached_plan(link.trajectory_id, key_id)
        task = plan.task if plan else identity.task
        prompt = plan.prompt if plan and not is_helper else None
        prompt = prompt or self._policies.prompt_of(alias, version)
        return Placement(alias, version, link, attempt, now, task, prompt, draw)

    def end_call(
        self, placement: Placement, record: CallEnded | None, leaves: Sequence[Leaf], now: float, *, retryable: bool
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

    def task_family(self, placement: Placement, start: CallStarted) -> str:
        """Return the task family of a call's trajectory."""
        return self._linker.task_family(placement.link.trajectory_id, start.task, start.tools_hash)

    def _evidence(
        self,
        request: AdmissionRequest,
        plan: RolloutPlan | None,
        alias: str,
        requested: int | None,
        attempt: AttemptKey,
        now: float,
        *,
        is_helper: bool,
    ) -> LinkEvidence:
        identity, follows = request.identity, request.follows
        explicit = identity.trajectory
        is_other = alias in self._policies.other_models
        if follows is not None and follows.alias != alias and not is_other:
            # Another agent's conversation is continued in content only: its trajectory goes on with its own agent.
            follows, explicit = None, None if identity.named_by == "previous_response" else explicit
        # If a rollout runs on another model, the named trajectory is that model's. Else the other model only helps.
        is_own = identity.named_by == "previous_response" and follows is not None and follows.alias == alias
        if explicit is not None and (is_helper if plan else is_other) and not is_own:
            explicit = name_of_other_agent(explicit, alias)
        return LinkEvidence(
            alias=alias,
            version=requested,
            messages=request.messages,
            keys=request.keys,
            answer_digests=request.answer_digests,
            key_id=attempt.key_id,
            explicit=explicit,
            explicit_by=identity.named_by,
            follows=follows.call_id if follows else None,
            follows_unlinked=follows is not None and follows.purpose == UNLINKED,
            attempt=attempt,
            is_retry=identity.is_retry,
            arrived_at=now,
            is_other_model=is_other,
            planned_purpose=None if plan is None else _NOT_TRAINED if is_helper else plan.purpose,
            is_partial=request.is_partial,
        )

    def _never_answers(self, link: Link, alias: str) -> bool:
        """Return whether a repeated first call belongs to a rejected version that has not answered its trajectory.

        The version may be one that cannot be loaded: the call would fail there every time.
        """
        return (
            link.parent is None
            and link.version is not None
            and link.purpose == "live"
            and self._policies.is_rejected(alias, link.version)
            and not self._linker.answers_of(link.trajectory_id)
        )

    def _moved(self, link: Link, alias: str) -> Link:
        """Return the link of a trajectory whose version was rolled back at once: to the version that it goes on with.

        Measurements of a version stay on it.
        """
        if link.purpose not in ("live", MOVED, UNLINKED):
            return link
        current = self._linker.version_of(link.trajectory_id)
        if current is None or self._policies.is_recalled(alias, current):
            current = self._policies.live_version(alias)
        return self._linker.move(link, current)

    def _first_version(
        self, alias: str, link: Link, plan: RolloutPlan | None, identity: CallIdentity
    ) -> tuple[int, VersionDraw | None]:
        """Return the version of a new trajectory, and its draw.

        Rollouts of training draw like users, but are no evidence about a version. Measured ones start on the live one.
        """
        if plan is None:
            return self._policies.draw_version(alias, link.trajectory_id, _unit(link, identity))
        if plan.plain:
            return self._policies.draw_version(alias, link.trajectory_id, counted=False)
        return self._policies.live_version(alias), None


def _unit(link: Link, identity: CallIdentity) -> str | None:
    """Return the user or session that a new trajectory draws for; None without one. A key alone is neither."""
    if identity.user is not None:
        return unit_of("user", link.key_id, identity.user)
    return unit_of("session", link.key_id, identity.trajectory) if identity.trajectory else None


def planned_model(model: str, plan: RolloutPlan | None, policies: PolicyCache) -> tuple[str, bool]:
    """Return the model that serves a call, and whether it only helps the rollout that the call belongs to."""
    if plan is None:
        return model, False
    is_helper = plan.is_helper(model, policies.other_models, policies.aliases)
    return model if is_helper or plan.model is None else plan.model, is_helper
