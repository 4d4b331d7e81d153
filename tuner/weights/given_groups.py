"""Groups that a caller scored: checked, stored if they were not recorded here, and handed to the trainer.

Guarantees: all groups are handed over in one transaction, or none; a trajectory is trained once, also if a call is
repeated; a reward reaches the trainer as the score of its trajectory; nothing is tokenized, so a trajectory without the
engine's ids is refused.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ratchet.store.errors import InvalidTransition, RecordNotFound
from ratchet.store.ids import new_id
from ratchet.store.records import GATHERED, REQUESTED, Verdict
from ratchet.store.scores import SCORE_RANGE, number_of
from ratchet.store.states import TuningState
from ratchet.store.store import Store
from ratchet.trainer.controller.judges.limits import components_problem, cut
from ratchet.trainer.errors import TuningError
from ratchet.trainer.statistics import has_signal
from ratchet.trainer.tasks import content_id
from ratchet.tuner.rollouts.trajectory_groups import ScoredTrajectory, TrajectoryGroup, check_groups
from ratchet.tuner.weights.imported_calls import check_calls, records_of

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
