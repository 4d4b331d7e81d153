"""From scores to advantages: judged groups, estimators, and the baseline of what has no group."""

from __future__ import annotations

import math
import statistics
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from ratchet.store.records import RESAMPLE, Group, PastScore, Trajectory, Verdict
from ratchet.trainer.errors import PluginError, TrainerError
from ratchet.trainer.settings.objectives import DEFAULT_ESTIMATOR, AdvantageFunctions, find_estimator
from ratchet.trainer.settings.trainer_settings import MAX_SCORES_PER_FAMILY
from ratchet.trainer.statistics import MIN_SCORE_SPREAD, differs, has_signal

# JudgedGroup: a group with its verdicts and advantages, as the judge runner hands it to the training round.


@dataclass(frozen=True, slots=True)
class MemberAdvantages:
    """The advantages of one trajectory.

    whole    of its tokens, unless their role or turn has its own
    by_role  of the tokens that a role sampled; empty if roles are not trained separately
    by_turn  added for the tokens of single calls, by the number of the call in the trajectory, from 1
    """

    whole: float
    by_role: Mapping[str, float] = field(default_factory=dict)
    by_turn: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JudgedGroup:
    """The judged members of a group. `members`, `verdicts` and `advantages` have the same order.

    `advantages` is None for a single whose task family has no baseline yet.
    """

    group: Group
    members: tuple[Trajectory, ...]
    verdicts: tuple[Verdict, ...]
    advantages: tuple[MemberAdvantages, ...] | None

    @property
    def has_signal(self) -> bool | None:
        """Whether an advantage differs from zero; None for a single without a baseline."""
        if self.advantages is None:
            return None
        if len(self.members) == 1:
            return abs(self.advantages[0].whole) > MIN_SCORE_SPREAD
        return any(
            any(member.by_role.values() if member.by_role else (member.whole,)) or any(member.by_turn.values())
            for member in self.advantages
        )


def is_cohort(members: Sequence[Trajectory]) -> bool:
    """Whether the members of a group attempted different tasks; then only their scores can be compared."""
    return len({member.group_key for member in members}) > 1


# Advantages: how much better each member of a group did than the group, or a single than earlier trajectories.
#
# Pure functions from scores to advantages, named as in the literature. They return finite numbers in the order of the
# scores, and zeros if the scores do not differ by more than the judge's `noise`, the standard deviation of its scores
# of one and the same answer (trainer/statistics.py).
#
#     grpo         A_i = (r_i - mean(r)) / std(r): Shao et al. 2024, "DeepSeekMath", section 4.1.2 (arXiv:2402.03300);
#                  the sample standard deviation (G - 1), as in TRL, but at least 5 times the noise: of an advantage at
#                  most 0.2 (one standard deviation) is noise
#     dr_grpo      A_i = r_i - mean(r): no bias towards groups of little spread, Liu et al. 2025 (arXiv:2503.20783)
#     rloo         A_i = r_i - mean of the others: Ahmadian et al. 2024 (arXiv:2402.14740)
#     reinforce++  A_i = r_i - mean(r), then divided by the standard deviation over the round: the variant with a group
#                  baseline of Hu et al. 2025 (arXiv:2501.03262), with the same floor
#
# Other packages register their own: `ratchet.trainer.settings.objectives`.

# Added to the standard deviation, as in TRL: a tiny spread must not become a large advantage.
STD_FLOOR = 1e-4
NOISE_FLOOR = 5.0  # times the judge's noise: no smaller standard deviation divides an advantage

# A single that differs from hundreds of equal scores is not a hundred times better than they are.
MAX_SINGLE_ADVANTAGE = 5.0


def group_advantages(
    scores: Sequence[float], estimator: str = DEFAULT_ESTIMATOR, noise: float = 0.0
) -> tuple[float, ...]:
    """Return the advantages of G scores, (G,) -> (G,), before `scale_over_round`.

    A group without variance gives zeros. Raises TrainerError if a score is not finite.
    """
    if not all(map(math.isfinite, scores)):
        raise TrainerError(f"scores {list(scores)} are not all finite: a failed verdict is a state, not a score")
    if not has_signal(scores, noise):
        return (0.0,) * len(scores)
    plugin = find_estimator(estimator)
    if plugin is not None:
        return _of_plugin(plugin, scores, estimator)
    mean = statistics.fmean(scores)
    scale = 1.0
    if estimator == "grpo":
        scale = _floored(statistics.stdev(scores), noise)
    elif estimator == "rloo":  # r_i - (sum - r_i) / (G - 1) = (r_i - mean) G / (G - 1)
        scale = (len(scores) - 1) / len(scores)
    return tuple((score - mean) / scale for score in scores)


def cohort_advantages(
    scores: Sequence[float], estimator: str = DEFAULT_ESTIMATOR, noise: float = 0.0
) -> tuple[float, ...]:
    """Return the advantages of G scores of different tasks, (G,) -> (G,): each relative to the mean of the others.

    That mean does not depend on the member's own score, as a baseline must not. grpo divides by the cohort's standard
    deviation.
    """
    over_others = group_advantages(scores, "rloo", noise)
    scale = _floored(statistics.stdev(scores), noise) if estimator == "grpo" and any(over_others) else 1.0
    return tuple(advantage / scale for advantage in over_others)


def single_advantage(
    score: float, mean: float, std: float, estimator: str = DEFAULT_ESTIMATOR, noise: float = 0.0
) -> float:
    """Return the advantage of a single over the running baseline of its family, which never includes it.

    grpo divides by the family's standard deviation.
    """
    if not differs(score, mean, noise):
        return 0.0
    advantage = (score - mean) / (_floored(std, noise) if estimator == "grpo" else 1.0)
    return max(-MAX_SINGLE_ADVANTAGE, min(MAX_SINGLE_ADVANTAGE, advantage))


def scale_over_round(
    advantages: Sequence[tuple[str, float]], estimator: str, *, by_family: bool, noise: float = 0.0
) -> list[float]:
    """Return the scaled advantages of a round's trajectories, given as (task family, advantage).

    reinforce++ divides by the standard deviation of the round. With `by_family`, every estimator divides the advantages
    of each family by their own standard deviation: a family with large scores does not dominate the others.
    """
    if estimator != "reinforce++" and not by_family:
        return [advantage for _, advantage in advantages]
    families: dict[str, list[float]] = {}
    for family, advantage in advantages:
        families.setdefault(family if by_family else "", []).append(advantage)
    least = 1.0 if estimator == "grpo" else NOISE_FLOOR * noise  # grpo's are no scores, and have their floor already
    scales: Mapping[str, float] = {name: _spread(values, least) for name, values in families.items()}
    return [advantage / scales[family if by_family else ""] for family, advantage in advantages]


def _of_plugin(plugin: AdvantageFunctions, scores: Sequence[float], name: str) -> tuple[float, ...]:
    """Return a plug-in's advantages. Raises PluginError if they are not one finite number for each score."""
    found = tuple(float(advantage) for advantage in plugin.group(tuple(scores)))
    if len(found) != len(scores) or not all(map(math.isfinite, found)):
        raise PluginError(
            f"advantage estimator {name!r} returned {list(found)} for {len(scores)} scores: it must return one finite "
            "number for each; correct the plug-in, or set trainer.advantage_estimator to a built-in one"
        )
    return found


def _floored(std: float, noise: float) -> float:
    return max(std, NOISE_FLOOR * noise) + STD_FLOOR


def _spread(values: Sequence[float], least: float) -> float:
    """Return the root mean square of centred advantages, at least STD_FLOOR and `least`."""
    return max(math.sqrt(statistics.fmean(value * value for value in values)), least, STD_FLOOR)


# The running baseline of ungrouped trajectories: earlier scores of the same task family. Pure, in memory.
#
# A baseline uses only scores that were given before the sample's own. It never includes the sample and does not depend
# on it (Williams 1992: any such baseline leaves the gradient unbiased). Newer scores have more weight, with a half-life
# of `HALF_LIFE` scores, because the policy changes. If other attempts at the same task are known (the cohort), their
# mean shrinks towards the family's mean with the weight of `SHRINKAGE` scores.

HALF_LIFE = 64.0  # scores
SHRINKAGE = 4.0  # scores
_MAX_FAMILIES = 4096


@dataclass(frozen=True, slots=True)
class Baseline:
    """Mean and standard deviation to compare with, and the number of scores behind them."""

    mean: float
    std: float
    count: int


class ScoreHistory:
    """The scores of one alias and one version of its judge, by task family. Threads may add and read concurrently."""

    def __init__(self, past: Sequence[PastScore] = ()) -> None:
        self._families: dict[str, deque[PastScore]] = {}
        self._lock = threading.Lock()
        for scored in sorted(past, key=lambda one: one.judged_at):
            self.add(scored)

    def add(self, scored: PastScore) -> None:
        """Add a score. It replaces an earlier score of the same trajectory."""
        with self._lock:
            if scored.family not in self._families and len(self._families) >= _MAX_FAMILIES:
                del self._families[next(iter(self._families))]
            scores = self._families.setdefault(scored.family, deque(maxlen=MAX_SCORES_PER_FAMILY))
            for earlier in [one for one in scores if one.trajectory_id == scored.trajectory_id]:
                scores.remove(earlier)
            scores.append(scored)

    def families_with_baseline(self, min_scores: int) -> set[str]:
        """Return the families that have at least `min_scores` scores."""
        with self._lock:
            return {family for family, scores in self._families.items() if len(scores) >= min_scores}

    def baseline(self, sample: PastScore, min_scores: int) -> Baseline | None:
        """Return the baseline for a sample; None if fewer than `min_scores` scores were given before it."""
        with self._lock:
            family = tuple(self._families.get(sample.family, ()))
        earlier = [
            one for one in family if one.judged_at < sample.judged_at and one.trajectory_id != sample.trajectory_id
        ]
        if len(earlier) < min_scores:
            return None
        mean, variance = _moments(earlier)
        cohort = [one for one in earlier if one.cohort == sample.cohort]
        if cohort:
            cohort_mean, _ = _moments(cohort)
            weight = len(cohort) / (len(cohort) + SHRINKAGE)
            mean = weight * cohort_mean + (1.0 - weight) * mean
        return Baseline(mean, math.sqrt(variance), len(earlier))


def _moments(scores: Sequence[PastScore]) -> tuple[float, float]:
    """Return the weighted (mean, variance) of scores, oldest first."""
    weights = [0.5 ** ((len(scores) - 1 - place) / HALF_LIFE) for place in range(len(scores))]
    total = sum(weights)
    mean = sum(weight * one.score for weight, one in zip(weights, scores, strict=True)) / total
    return mean, sum(w * (one.score - mean) ** 2 for w, one in zip(weights, scores, strict=True)) / total


# AdvantageEstimator: from the verdicts of a group to a JudgedGroup. Only this module knows the kinds of groups.
#
# A group compares its members with each other. A cohort, a group of different tasks, compares each member with the mean
# of the others. An ungrouped trajectory is compared with the running baseline of its task family; until the family has
# `min_baseline_samples` earlier scores it has no advantage, and only adds its own score to the baseline. If roles are
# trained separately, a verdict may score each role: the component that has the role's name is that role's score.
#
# A component `turn:3` is the reward of a trajectory's third call. The turn rewards of a group are compared with each
# other like scores, and `turn_weight` times their advantage is added for the tokens of that call. Groups in which only
# some members have turn rewards, cohorts and ungrouped trajectories have nothing to compare and get none.

_TURN = "turn:"


@dataclass(frozen=True, slots=True)
class AdvantageEstimator:
    """How the scores of one alias become advantages. `history` holds the scores so far and grows."""

    name: str = DEFAULT_ESTIMATOR
    by_family: bool = False
    min_baseline_samples: int = 16
    roles: tuple[str, ...] = ()  # the roles that train; empty if roles are not separated
    history: ScoreHistory = field(default_factory=ScoreHistory)
    turn_weight: float = 0.0
    distilled: bool = False  # nothing is compared: a teacher's logprobs are the signal
    noise: float = 0.0  # the standard deviation of the judge's scores of one and the same answer

    def estimate(self, group: Group, members: Sequence[Trajectory], verdicts: Sequence[Verdict]) -> JudgedGroup:
        """Return the group with its advantages; the verdict of an ungrouped trajectory records its baseline."""
        if self.distilled:
            return JudgedGroup(group, tuple(members), tuple(verdicts), (MemberAdvantages(0.0),) * len(members))
        verdicts = self._with_baseline(members, verdicts)
        whole = self.advantages(members, verdicts)
        if whole is None:
            return JudgedGroup(group, tuple(members), tuple(verdicts), None)
        by_role = {role: self.advantages(members, verdicts, role) or whole for role in self.roles}
        turns = turn_advantages(verdicts, self.name, 0.0 if is_cohort(members) else self.turn_weight, self.noise)
        advantages = tuple(
            MemberAdvantages(whole[place], {role: found[place] for role, found in by_role.items()}, turns[place])
            for place in range(len(members))
        )
        return JudgedGroup(group, tuple(members), tuple(verdicts), advantages)

    def advantages(
        self, members: Sequence[Trajectory], verdicts: Sequence[Verdict], role: str | None = None
    ) -> tuple[float, ...] | None:
        """Return the advantages of a group's members, or of one role's tokens, (G,) -> (G,).

        None for a single whose verdict has no baseline.
        """
        if is_cohort(members):
            return cohort_advantages(_scores(verdicts, role), self.name, self.noise)
        if len(members) > 1:
            return group_advantages(_scores(verdicts, role), self.name, self.noise)
        (verdict,) = verdicts
        if verdict.baseline_mean is None:
            return None
        mean, std = verdict.baseline_mean, verdict.baseline_std or 0.0
        return (single_advantage(verdict.score or 0.0, mean, std, self.name, self.noise),)

    def remember(self, members: Sequence[Trajectory], verdicts: Sequence[Verdict]) -> None:
        """Add scores to the history, except those of resamples: they are not traffic."""
        for member, verdict in zip(members, verdicts, strict=True):
            if member.purpose != RESAMPLE:
                self.history.add(past_score(member, verdict))

    def scale_over_round(self, judged: Sequence[JudgedGroup]) -> list[MemberAdvantages]:
        """Return the advantages of all members of a round's groups, in order, scaled over the round."""
        if self.distilled:
            return [MemberAdvantages(0.0) for group in judged for _ in group.members]
        families = [member.family for group in judged for member in group.members]
        found = [one for group in judged for one in group.advantages or [MemberAdvantages(0.0)] * len(group.members)]
        whole = self._scaled(families, [one.whole for one in found])
        by_role = {role: self._scaled(families, [one.by_role.get(role, 0.0) for one in found]) for role in self.roles}
        return [
            MemberAdvantages(whole[place], {role: scaled[place] for role, scaled in by_role.items()}, one.by_turn)
            for place, one in enumerate(found)
        ]

    def _scaled(self, families: Sequence[str], advantages: Sequence[float]) -> list[float]:
        pairs = list(zip(families, advantages, strict=True))
        return scale_over_round(pairs, self.name, by_family=self.by_family, noise=self.noise)

    def _with_baseline(self, members: Sequence[Trajectory], verdicts: Sequence[Verdict]) -> list[Verdict]:
        """Return the verdicts; that of a single with its family's baseline, unless it has one already.

        The baseline is stored because later scores push earlier ones out of the history while a single waits for its
        round.
        """
        if len(members) != 1 or verdicts[0].baseline_mean is not None:
            return list(verdicts)
        found = self.history.baseline(past_score(members[0], verdicts[0]), self.min_baseline_samples)
        if found is None:
            return list(verdicts)
        return [msgspec.structs.replace(verdicts[0], baseline_mean=found.mean, baseline_std=found.std)]


def turn_advantages(
    verdicts: Sequence[Verdict], estimator: str, weight: float, noise: float = 0.0
) -> list[Mapping[int, float]]:
    """Return the weighted advantages of each member's turns, by the number of the call."""
    rewards = [_turn_rewards(verdict) for verdict in verdicts]
    if not weight or len(rewards) < 2 or not all(rewards):
        return [{} for _ in rewards]
    advantages = iter(group_advantages([score for turns in rewards for score in turns.values()], estimator, noise))
    return [{number: weight * next(advantages) for number in turns} for turns in rewards]


def past_score(member: Trajectory, verdict: Verdict) -> PastScore:
    return PastScore(
        trajectory_id=member.id,
        family=member.family,
        cohort=member.group_key,
        version=member.version,
        score=verdict.score or 0.0,
        judged_at=verdict.judged_at,
    )


def _turn_rewards(verdict: Verdict) -> dict[int, float]:
    named = {name.removeprefix(_TURN): score for name, score in verdict.components.items() if name.startswith(_TURN)}
    return {int(number): score for number, score in named.items() if number.isdecimal()}


def _scores(verdicts: Sequence[Verdict], role: str | None) -> list[float]:
    """Return the scores of a role: the component of its name if every verdict has it, else the overall scores."""
    if role is not None and all(role in verdict.components for verdict in verdicts):
        return [verdict.components[role] for verdict in verdicts]
    return [verdict.score or 0.0 for verdict in verdicts]
