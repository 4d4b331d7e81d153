"""Groups of trajectories with rewards, as `ratchet.gather` returns them and `ratchet.train` takes them.

Guarantees of the training: all groups are handed over in one transaction, or none; a trajectory is trained once, also
if a call is repeated; a reward reaches the trainer as the score of its trajectory; nothing is tokenized, so a
trajectory without the engine's ids is refused. Imported trajectories, with ids and logprobs that the caller sampled,
become the records that a proxy would ship.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from ratchet.store.content.messages import node, path
from ratchet.store.errors import InvalidTransition, RecordNotFound
from ratchet.store.ids import new_id
from ratchet.store.records import (
    GATHERED,
    REQUESTED,
    CallEnded,
    CallStarted,
    Choice,
    MessageNode,
    Verdict,
    pack_ids,
    pack_logprobs,
)
from ratchet.store.states import CallState, TuningState
from ratchet.store.statistics import SCORE_RANGE, number_of
from ratchet.store.store import Store
from ratchet.trainer.errors import TuningError
from ratchet.trainer.judges.judgement import components_problem, cut
from ratchet.trainer.statistics import has_signal
from ratchet.trainer.tasks import content_id


@dataclass(frozen=True, slots=True)
class SampledCall:
    """One answer that an engine sampled, for a trajectory that Ratchet did not record.

    prompt_token_ids  the engine's ids of the whole prompt, not ids of a tokenizer that rendered it again
    token_ids         the sampled ids, with the end token
    logprobs          of the sampled tokens, under the distribution that they were drawn from (vLLM:
                      `--logprobs-mode processed_logprobs`)
    sampling          sampling parameters of the request, such as temperature
    finish_reason     as the engine gave it
    """

    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    finish_reason: str | None = "stop"


@dataclass(frozen=True, slots=True)
class ScoredTrajectory:
    """One attempt at a scenario. Its tokens are recorded under its `id`, or given as `calls`.

    reward       higher is better; None: not trained
    id           of a trajectory that `gather` recorded; "": `calls` has the tokens
    messages     the conversation, for judges and people
    response     what the workflow returned
    metrics      name -> number
    failure      the exception of the workflow or the judge
    explanation  the judge's
    calls        the sampled answers of an imported trajectory, in order
    version      the agent's version that sampled an imported one, such as 3; None: the live one
    """

    reward: float | None = None
    id: str = ""
    messages: Sequence[Mapping[str, Any]] = ()
    response: Any = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    failure: str | None = None
    explanation: str = ""
    calls: Sequence[SampledCall] = ()
    version: int | None = None


@dataclass(frozen=True, slots=True)
class TrajectoryGroup:
    """Attempts at one scenario, whose rewards are compared with each other.

    trajectories  failed ones included
    scenario      the row; judges get it as `task`
    run           the id of the run that gathered them
    """

    trajectories: Sequence[ScoredTrajectory]
    scenario: Mapping[str, Any] = field(default_factory=dict)
    run: str | None = None

    @property
    def rewards(self) -> tuple[float | None, ...]:
        """The reward of each trajectory."""
        return tuple(one.reward for one in self.trajectories)

    def with_rewards(self, rewards: Sequence[float | None]) -> Self:
        """Return the group with other rewards, one for each trajectory. Raises ValueError."""
        if len(rewards) != len(self.trajectories):
            raise ValueError(
                f"{len(rewards)} rewards are given for the {len(self.trajectories)} trajectories of this group: give "
                "one for each, None for those that are not trained"
            )
        given = [replace(one, reward=reward) for one, reward in zip(self.trajectories, rewards, strict=True)]
        return replace(self, trajectories=tuple(given))


def check_groups(groups: Sequence[object]) -> None:
    """Raise TuningError, which names the place, unless these are groups of trajectories."""
    if not groups:
        raise TuningError("groups is empty: give what `ratchet.gather` returned, or your own TrajectoryGroup")
    for place, group in enumerate(groups):
        if not isinstance(group, TrajectoryGroup):
            raise TuningError(f"groups[{place}] is {group!r:.100}: give a ratchet.TrajectoryGroup")
        for number, one in enumerate(group.trajectories):
            if not isinstance(one, ScoredTrajectory):
                where = f"groups[{place}].trajectories[{number}]"
                raise TuningError(f"{where} is {one!r:.100}: give a ratchet.ScoredTrajectory")


CALLER = "caller"  # the judge of rewards that a caller gave

NO_REWARD = "no reward"
NO_SIGNAL = "equal rewards in the group"
TOO_FEW = "fewer than two rewards in the group"


@dataclass(slots=True)
class Given:
    """What is trained of the given groups.

    groups    the members and their rewards by group
    left_out  trajectories that are not trained, by reason
    """

    groups: list[tuple[TrajectoryGroup, list[ScoredTrajectory]]] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


def read_given(groups: Sequence[TrajectoryGroup]) -> Given:
    """Return what can be trained. Raises TuningError if a trajectory is malformed, or if nothing can be trained."""
    check_groups(groups)
    given, seen = Given(), Counter[str]()
    for place, group in enumerate(groups):
        for number, one in enumerate(group.trajectories):
            _check(one, f"groups[{place}].trajectories[{number}]")
        seen.update(one.id for one in group.trajectories if one.id)
        scored = [one for one in group.trajectories if one.reward is not None]
        given.left_out[NO_REWARD] += len(group.trajectories) - len(scored)
        if len(scored) < 2:
            given.left_out[TOO_FEW] += len(scored)
        elif not has_signal([float(one.reward or 0.0) for one in scored]):
            given.left_out[NO_SIGNAL] += len(scored)
        else:
            given.groups.append((group, scored))
    if twice := [name for name, count in seen.items() if count > 1]:
        raise TuningError(f"{twice[0]} is given {seen[twice[0]]} times: a trajectory is trained once")
    given.left_out = +given.left_out
    if not given.groups:
        reasons = ", ".join(f"{count} of {reason}" for reason, count in given.left_out.items())
        raise TuningError(
            f"no group has a learning signal ({reasons}): give rewards that differ within a group; harder or easier "
            "scenarios, or more attempts, help"
        )
    return given


def _check(one: ScoredTrajectory, where: str) -> None:
    if one.reward is not None and number_of(one.reward) is None:
        raise TuningError(
            f"{where}.reward is {one.reward!r:.50}: give a finite number {SCORE_RANGE}, or None to leave it out"
        )
    if problem := components_problem(one.metrics):
        raise TuningError(f"{where}.metrics: {problem}")
    if not one.id and not one.calls and (one.reward is not None or (one.messages and one.failure is None)):
        raise TuningError(
            f"{where} has neither an id nor calls: messages alone are not trained, because their token ids would be "
            "guessed. Gather it with `ratchet.gather`, or give the engine's token ids and logprobs as `calls`. To "
            "imitate conversations, warm-start: docs/training.md"
        )
    if one.id and one.calls:
        raise TuningError(f"{where} has an id and calls: leave one of the two out")
    check_calls(one.calls, where)


def hand_over(store: Store, alias: str, run: str, given: Given) -> list[str]:
    """Store imported trajectories and give all groups to the trainer of `alias`; return the ids of the groups.

    A group that the trainer has already, from a call that ended early, is not given again. `run`: the run that asks for
    the training. Raises TuningError if a trajectory was trained or dropped, or belongs to another agent.
    """
    earlier = [_handed_over(store, members) for _, members in given.groups]
    rest = [one for one, known in zip(given.groups, earlier, strict=True) if known is None]
    _check_recorded(store, alias, [one.id for _, members in rest for one in members if one.id])
    live = store.policies.live()
    default = live[alias].version if alias in live else 0
    wanted: dict[str, list[Verdict]] = {}
    for number, (group, members) in enumerate(rest):
        # Attempts with equal rows are one task; without a row, the group is a task of its own.
        task = content_id(group.scenario) if group.scenario else f"{run}/{number}"
        names = [one.id or new_id("traj") for one in members]
        for name, one in zip(names, members, strict=True):
            if not one.id:
                version = default if one.version is None else one.version
                store.calls.ship(records_of(one, trajectory_id=name, alias=alias, version=version, task=task))
        wanted[f"{REQUESTED}{run}:{number}"] = [
            _verdict(name, one) for name, one in zip(names, members, strict=True)
        ]  # fmt: skip
    try:
        created = iter(store.groups.create_scored(alias, wanted, time.time()))
    except InvalidTransition as refusal:
        raise TuningError(f"{refusal}: gather new ones") from refusal
    return [known or next(created) for known in earlier]


def _handed_over(store: Store, members: Sequence[ScoredTrajectory]) -> str | None:
    """Return the group of these trajectories with these rewards that a call handed over which ended early."""
    rewards = {one.id: one.reward for one in members}
    try:
        groups = {store.trajectories.get(name).group_id for name in rewards}
        (name,) = groups if len(groups) == 1 else (None,)
        group = None if name is None else store.groups.get(name)
        if group is None or not group.is_requested or set(group.members) != set(rewards):
            return None
        call = store.tunings.get(group.key.removeprefix(REQUESTED).rpartition(":")[0])
    except RecordNotFound:
        return None
    given = {name: verdict.score for name, verdict in store.groups.verdicts(list(rewards)).items()}
    return group.id if call.state is not TuningState.DONE and given == rewards else None


def _check_recorded(store: Store, alias: str, names: Sequence[str]) -> None:
    """Raise TuningError, which names the trajectory, if one cannot be trained."""
    for name in names:
        try:
            found = store.trajectories.get(name)
        except RecordNotFound as unknown:
            raise TuningError(
                f"trajectory {name} is not in this project's store: none of its calls reached the proxy, or it was "
                "gathered in another project (config=, project=)"
            ) from unknown
        if found.purpose != GATHERED or found.alias != alias:
            raise TuningError(
                f"trajectory {name} is {found.purpose} traffic of {found.alias}: train what `ratchet.gather` gathered "
                f"for {alias}; the trainer takes live traffic by itself"
            )
        if found.group_id is not None or found.drop_reason is not None:
            raise TuningError(f"trajectory {name} is {found.state}: a trajectory is trained once; gather new ones")


def _verdict(name: str, one: ScoredTrajectory) -> Verdict:
    return Verdict(
        trajectory_id=name, group_id=None, judge=CALLER, judge_version=CALLER, score=float(one.reward or 0.0),
        explanation=cut(one.explanation), components=dict(one.metrics), judged_at=time.time(),
    )  # fmt: skip


def describe_left_out(left_out: Mapping[str, int]) -> str:
    """Return what was not trained, for people; empty if nothing."""
    return ", ".join(f"{count} trajectories: {reason}" for reason, count in left_out.items())


LINKED_BY = "import"
_MAX_ID = 2**31
_LOGPROB_ERROR = 1e-3  # by which rounding may raise a logprob above zero
# In place of a conversation that the caller did not give, or that has another number of answers than calls.
_PROMPT: Mapping[str, Any] = {"role": "prompt", "content": "(imported token ids)"}
_ANSWER: Mapping[str, Any] = {"role": "assistant", "content": "(imported token ids)"}


def check_calls(calls: Sequence[SampledCall], where: str) -> None:
    """Raise TuningError, which names the place, if a call is malformed."""
    for number, call in enumerate(calls):
        place = f"{where}.calls[{number}]"
        if not isinstance(call, SampledCall):
            raise TuningError(f"{place} is {call!r:.100}: give a ratchet.SampledCall")
        for name in ("prompt_token_ids", "token_ids"):
            ids = getattr(call, name)
            if not ids or any(not isinstance(one, int) or not 0 <= one < _MAX_ID for one in ids):
                raise TuningError(f"{place}.{name}: give the engine's token ids, one or more integers from 0")
        if len(call.logprobs) != len(call.token_ids):
            raise TuningError(
                f"{place} has {len(call.token_ids)} token_ids and {len(call.logprobs)} logprobs: give one logprob for "
                "each sampled token, the end token included"
            )
        if any(not math.isfinite(one) or one > _LOGPROB_ERROR for one in call.logprobs):
            raise TuningError(f"{place}.logprobs: a logprob is a finite number of at most 0")


def records_of(
    given: ScoredTrajectory, *, trajectory_id: str, alias: str, version: int, task: str
) -> list[CallStarted | CallEnded]:
    """Return the starts and ends of an imported trajectory's calls.

    A prompt that begins with the prompt and the answer before it, id for id, continues the same sequence; any other one
    is a context of its own.
    """
    turns = _turns(given)
    records: list[CallStarted | CallEnded] = []
    before: tuple[str, list[int]] | None = None  # the call before, and its ids
    now = time.time()
    for number, (call, (prompt_nodes, answer)) in enumerate(zip(given.calls, turns, strict=True)):
        prompt, sampled = list(call.prompt_token_ids), list(call.token_ids)
        exact = before is not None and prompt[: len(before[1])] == before[1]
        start = CallStarted(
            call_id=new_id("call"), trajectory_id=trajectory_id, started_at=now + number * 1e-6, alias=alias,
            version=version, dialect="chat" if given.messages else "completions", streamed=False, linked_by=LINKED_BY,
            prompt_node=prompt_nodes[-1].hash, parent_call=before[0] if before else None, task=task, purpose=GATHERED,
            sampling=dict(call.sampling), nodes=tuple(prompt_nodes),
        )  # fmt: skip
        choice = Choice(
            index=0, finish_reason=call.finish_reason, token_ids=pack_ids(sampled),
            logprobs=pack_logprobs(list(call.logprobs)), reply_node=answer.hash,
        )  # fmt: skip
        end = CallEnded(
            start=start, state=CallState.ANSWERED, ended_at=now + number * 1e-6, status=200,
            context="root" if before is None else "exact" if exact else "fork",
            prompt_ids=pack_ids(prompt[len(before[1]) :] if before is not None and exact else prompt),
            prompt_tokens=len(prompt), completion_tokens=len(sampled), choices=(choice,), nodes=(answer,),
        )  # fmt: skip
        records += [start, end]
        before = (start.call_id, prompt + sampled)
    return records


def _turns(given: ScoredTrajectory) -> list[tuple[tuple[MessageNode, ...], MessageNode]]:
    """Return the nodes of each call's prompt, and the node of its answer."""
    answers = [place for place, one in enumerate(given.messages) if one.get("role") == "assistant" and place]
    if len(answers) != len(given.calls):
        prompt = path([_PROMPT])
        return [(prompt, node(prompt[-1].hash, _ANSWER)) for _ in given.calls]
    nodes = path(given.messages)
    return [(nodes[:place], nodes[place]) for place in answers]
