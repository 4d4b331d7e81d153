"""The learning report: scores of live traffic before and after, what moved the policy, what is missing."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ratchet.store.records import PastScore, Tally
from ratchet.store.reports.version_reports import read_unproven
from ratchet.store.states import PolicyState, RoundState
from ratchet.store.statistics import Sums, interval, interval_of, squared_error, sums_of

if TYPE_CHECKING:
    from ratchet.store.store import Store

# How far rounds moved the policy: lost in rounding, too small, healthy or too large, and what to do.
#
# The metrics of a round (docs/training.md, "The learning rate"): `approx_kl` is the mean k3 over the trained tokens of
# its steps, in nats per token; `approx_kl_floor` is what rounding alone reads as, in this round with this model;
# `logprob_change_positive_mean` is the mean change of log p for positive advantages. Rounds without these metrics are
# skipped.

SEEN = 0.5  # of the floor: the smallest movement that can be distinguished from it
TOO_SMALL = 1e-4  # nats per token: no gain was seen below it
TOO_LARGE = 0.05  # nats per token: healthy rounds of tiny policies stayed below 0.03, collapsing ones had 0.1 to 0.4
COLLAPSING = -0.01  # nats per token: healthy rounds stayed above -0.005, collapsing ones fell below -0.02
RECENT_ROUNDS = 3  # rounds
_WORTH_NAMING = 0.1  # of k3
_ROUNDS_READ = 20  # rounds, of which some may have been abandoned

Size = Literal["lost in rounding", "too small", "healthy", "too large"]

_MEANS: Mapping[Size, str] = {
    "lost in rounding": "not distinguishable from rounding",
    "too small": "too small to be seen",
    "healthy": "healthy",
    "too large": "too large: rounds like this end in collapse",
}


@dataclass(frozen=True, slots=True)
class Movement:
    """What one round moved, with the floor of `k3`."""

    version: int | None
    k3: float
    logprob_change_positive: float
    rate: float
    floor: float = 0.0
    scale: float = 1.0  # of the rate and so of the movement, below 1 in a small round

    @property
    def above_floor(self) -> float:
        """Nats per token that the steps moved the policy."""
        return max(0.0, self.k3 - self.floor)

    @property
    def size(self) -> Size:
        """Lost in rounding, too small, healthy or too large."""
        if self.above_floor > TOO_LARGE:
            return "too large"
        if self.above_floor < SEEN * self.floor:
            return "lost in rounding"
        return "too small" if self.above_floor < TOO_SMALL * self.scale**2 else "healthy"

    @property
    def collapsing(self) -> bool:
        """Whether the round made its good answers less likely."""
        return self.logprob_change_positive < COLLAPSING

    def describe(self) -> str:
        """Return it in one clause."""
        rounding = f", of which {self.floor:.2g} is rounding" if self.floor > _WORTH_NAMING * self.k3 else ""
        return f"{self.k3:.2g} nats a token (k3) at rate {self.rate:.2g}{rounding}: {_MEANS[self.size]}"


def movement_of(metrics: Mapping[str, Any], version: int | None = None) -> Movement | None:
    """Return the movement of a round; None if it was not measured."""
    if not metrics.get("approx_kl_tokens"):
        return None
    return Movement(
        version=version,
        k3=float(metrics["approx_kl"]),
        logprob_change_positive=float(metrics["logprob_change_positive_mean"]),
        rate=float(metrics["learning_rate"]),
        floor=float(metrics.get("approx_kl_floor", 0.0)),
        scale=float(metrics.get("rate_scale", 1.0)),
    )


def recent_movements(store: Store, alias: str) -> list[Movement]:
    """Return the movements of an alias's newest committed rounds, newest first."""
    rounds = store.rounds.page(alias, limit=_ROUNDS_READ)
    committed = [one for one in rounds if one.state is RoundState.COMMITTED]
    found = (movement_of(one.metrics, one.to_version) for one in committed)
    return [moved for moved in found if moved is not None][:RECENT_ROUNDS]


def describe_collapse(moved: Movement) -> str:
    """Return why a round warns of collapse, and the remedies."""
    return (
        f"its steps made its good answers less likely "
        f"({moved.logprob_change_positive:+.3f} nats a token at rate {moved.rate:.2g}), "
        "and rounds like this end in collapse: lower learner.learning_rate or, where it is auto, learner.target_kl; "
        "learner.beta (0.01) holds the policy near the base model; `ratchet policies rollback` goes back"
    )


def describe_stall(newest_first: Sequence[Movement]) -> str | None:
    """Return a warning with the remedy if all of the last rounds moved too little; else None."""
    last = newest_first[:RECENT_ROUNDS]
    if len(last) < RECENT_ROUNDS or any(moved.size not in ("too small", "lost in rounding") for moved in last):
        return None
    most = max(moved.above_floor for moved in last)
    if any(moved.size == "lost in rounding" for moved in last):
        found = (
            f"moved the policy by less than its rounding shows ({max(moved.floor for moved in last):.2g} nats a token)"
        )
        more = ", or set learner.dtype and vllm.dtype to float32, which resolves smaller steps"
    else:
        found, more = f"moved the policy by at most {most:.2g} nats a token", ""
    return (
        f"the steps are too small to be seen: the last {RECENT_ROUNDS} rounds {found}, at rate {last[0].rate:.2g}; set "
        f"learner.learning_rate: auto, or ten times what it is; where it is auto, raise learner.target_kl{more}"
    )


# Rejected rows of a round: sampled by a policy too far from the one that is trained; how many, why, and what helps.
#
# Rejected rows leave the loss and its denominator, so a round that loses many of them trains on few tokens, chosen by
# how far the policy moved. `ratchet status`, the console and the sentinel's alarm show them.

MAX_SHARE = 0.25  # of the rows of a round; more is an alarm


@dataclass(frozen=True, slots=True)
class RejectedRows:
    """The rejected rows of a round. The mismatches are means of |trainer - vLLM| logprobs, nats a token."""

    rejected: int
    rows: int
    mismatch: float
    fresh_mismatch: float | None  # of rows that the version sampled from which the round started; None without any

    @property
    def share(self) -> float:
        """Share of the round's rows."""
        return self.rejected / self.rows

    def describe(self) -> str:
        """Return it in one clause."""
        return f"{self.rejected} of {self.rows} rows rejected" + (f" ({self.share:.0%})" if self.rejected else "")

    def alarm_reason(self) -> str | None:
        """Return why it is an alarm, with the remedies; None if it is not."""
        if self.share <= MAX_SHARE:
            return None
        fresh = "there are none" if self.fresh_mismatch is None else f"{self.fresh_mismatch:.3f}"
        return (
            f"{self.describe()} in the newest round: the policy that sampled them is too far from the one that is "
            f"trained. Logprobs of all rows differ by {self.mismatch:.3f} nats a token, those of rows that the round's "
            f"own first version sampled by: {fresh}. If the two are alike, vLLM and the learner compute differently: "
            "check vllm.dtype, learner.dtype and the base model. Else rows are old or steps too large: release or "
            "discard the versions that wait (`ratchet status` names them), or lower learner.learning_rate. "
            "learner.sequence_mask_threshold is the limit"
        )


def rejected_rows(metrics: Mapping[str, Any]) -> RejectedRows | None:
    """Return the rejected rows of a round, from its metrics; None if they were not counted."""
    rows, rejected = metrics.get("rows"), metrics.get("rows_rejected")
    if not rows or rejected is None:
        return None
    fresh = metrics.get("fresh_logprob_abs_diff_mean") if metrics.get("fresh_tokens_compared") else None
    return RejectedRows(int(rejected), int(rows), float(metrics.get("logprob_abs_diff_mean", 0.0)), fresh)


# Relative judges: their scores only rank the members of one group, and are never averaged across groups.
#
# The trainer records whether each judge is relative. Code that uses scores across groups checks it first; an unrecorded
# judge counts as absolute.

_KIND = "judge"
_UNRELEASED = (PolicyState.RAMP, PolicyState.REJECTED)


def record_judge_scale(store: Store, alias: str, version: str, *, relative: bool) -> None:
    """Record whether a judge's version is relative, once."""
    known = store.observations.latest(alias, _KIND).get(version)
    if known is None or bool(known.content.get("relative")) is not relative:
        store.observations.add(alias, _KIND, version, {"relative": relative})


def is_relative(store: Store, alias: str, version: str | None) -> bool:
    """Return whether a judge's version is relative."""
    known = store.observations.latest(alias, _KIND).get(version or "")
    return known is not None and bool(known.content.get("relative"))


def read_learning_report(store: Store, alias: str) -> LearningReport:
    """Return the learning report on the newest judge's scores, with the unproven versions; without figures if the
    scores are relative.
    """
    judge, unproven = store.groups.newest_judge_version(alias), read_unproven(store, alias)
    if is_relative(store, alias, judge):
        report = relative_report()
    else:
        rows = store.groups.score_tallies(alias, judge) if judge else []
        unreleased = [one.version for one in store.policies.all(alias) if one.state in _UNRELEASED]
        report = learning_report(rows, recent_movements(store, alias), unreleased)
    return replace(report, unproven=None if unproven is None else unproven.describe())


# The notes of the learning report: what is missing to decide, and why an interval is wide. Pure.
#
# The number of scores that would decide assumes the current difference and spread. Earlier versions get no further
# scores, so only the newest version's can grow; if that cannot decide, a side-by-side comparison is needed.

MAX_MORE_SCORES = 100_000  # a larger number is not worth waiting for


def more_scores(difference: float, before: float, after: float, count: int, z: float) -> int | None:
    """Return how many scores, besides `count`, exclude zero from the interval; None if no number does.

    `before` and `after`: squared standard errors of the two means; `z`: half-width of the interval in standard errors.
    """
    left = (difference / z) ** 2 - before
    if left <= 0:
        return None
    more = max(0, math.ceil(after * count / left) - count)
    return more if more <= MAX_MORE_SCORES else None


def _notes(whole: FamilyReport, versions: Sequence[VersionScore], newest_first: Sequence[Movement]) -> Iterator[str]:
    """Yield the notes on a comparison of all traffic."""
    if whole.gain.verdict == "unknown":
        yield _undecided(whole)
    yield _pooled("before", whole.before, versions)
    yield _pooled("after", whole.after, versions)
    between = [one for one in versions if whole.before.last_version < one.version < whole.after.first_version]
    if between:
        own = _versions(between[0].version, between[-1].version)
        yield f"left out: {own}, between the two sides"
    if whole.same_tasks is not None and whole.same_tasks.width > 1.5 * whole.gain.width:
        yield _few_tasks(whole.same_tasks)
    if whole.gain.verdict != "better" and (stall := describe_stall(newest_first)) is not None:
        yield stall


def _undecided(whole: FamilyReport) -> str:
    newest = _versions(whole.after.first_version, whole.after.last_version)
    if whole.more_scores is not None:
        scores = f"about {whole.more_scores} more scores of {newest}" if whole.more_scores else "a few more scores"
        return f"missing: {scores}, if the difference stays {whole.gain.value:+.3f} and scores spread as they do"
    oldest = _versions(whole.before.first_version, whole.before.last_version)
    return (
        f"missing: a larger difference, or more scores on both sides: {whole.gain.value:+.3f} is too small for the "
        f"{whole.before.count} scores of {oldest}, however many follow; `ratchet eval` compares two versions side by "
        "side"
    )


def _pooled(name: str, side: Side, versions: Sequence[VersionScore]) -> str:
    own = _versions(side.first_version, side.last_version)
    if side.first_version == side.last_version:
        which = "oldest" if name == "before" else "newest"
        return f"{name}: {own} alone, the {which}, has the {MIN_SCORES_PER_SIDE} scores that a side needs"
    end = side.first_version if name == "before" else side.last_version
    count = next(one.count for one in versions if one.version == end)
    return f"{name}: {own} together, since @{end} alone has {count} scores and a side needs {MIN_SCORES_PER_SIDE}"


def _few_tasks(gain: Gain) -> str:
    text = (
        f"on the same tasks the interval is wide because there are {gain.count}: each counts once, however many scores "
        "it has"
    )
    if gain.verdict != "unknown" or not gain.value:
        return text
    tasks = math.ceil(gain.count * (gain.width / 2 / gain.value) ** 2)
    return f"{text}; about {tasks} tasks would decide at this spread"


def _versions(first: int, last: int) -> str:
    return f"@{first}" if first == last else f"@{first} to @{last}"


# The records of the learning report.


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a comparison: its versions, number of trajectories and mean score."""

    first_version: int
    last_version: int
    count: int
    mean: float


@dataclass(frozen=True, slots=True)
class Gain:
    """A difference of means with its 95% interval over `count` trajectories or tasks."""

    value: float
    low: float
    high: float
    count: int

    @property
    def verdict(self) -> str:
        """`better`, `worse`, or `unknown` if the interval contains zero."""
        return "better" if self.low > 0 else "worse" if self.high < 0 else "unknown"

    @property
    def width(self) -> float:
        """Of its interval."""
        return self.high - self.low


@dataclass(frozen=True, slots=True)
class FamilyReport:
    """The comparison of one task family, or of all. `same_tasks` None: no task is on both sides."""

    family: str
    before: Side
    after: Side
    gain: Gain
    same_tasks: Gain | None
    more_scores: int | None  # of the newest versions, to decide; None: decided, or impossible


@dataclass(frozen=True, slots=True)
class VersionScore:
    """The mean score of a version's traffic with its 95% interval; for one score, the whole range."""

    version: int
    count: int
    mean: float
    low: float
    high: float


# The learning report: scores of live traffic before and after, with 95% intervals. Pure.
#
# `before` is the traffic of the first version, `after` that of the newest, each with as many adjacent versions as are
# needed for `MIN_SCORES_PER_SIDE` scores; versions that were rejected or are in a ramp are on neither side. The gain is
# the difference of the means, with Welch's interval (unequal variances) in the normal approximation. For tasks on both
# sides, the gain is also computed task by task, so that a change in the mix of tasks does not matter. All intervals
# include the two half observations of statistics.py, so that equal scores do not look certain, and are clipped to the
# range of scores: 0 to 1 if all lie there, else from the lowest to the highest seen. The verdict is "unknown" if the
# interval contains zero.

MIN_SCORES_PER_SIDE = 30  # scores on each side
RELATIVE_SCORES_NOTE = (
    "the judge's scores are relative: they rank the members of one group, and their mean is the same for good and for "
    "bad versions; compare versions with trainer.release.held_out_share, `ratchet eval`, or a judge that scores each "
    "answer by "
    "itself"
)
ALL_FAMILIES = "all"
_Key = TypeVar("_Key", int, str)
_Z = statistics.NormalDist().inv_cdf(0.975)

Range = tuple[float, float]  # what a score can be


@dataclass(frozen=True, slots=True)
class LearningReport:
    """The report; without families if there are too few scores or only one version."""

    families: tuple[FamilyReport, ...]  # `all` first
    versions: tuple[VersionScore, ...]
    missing: str | None  # why there is no comparison
    notes: tuple[str, ...] = ()  # missing scores, pooled versions, wide intervals
    unproven: str | None = None  # versions that serve nobody, whose traffic is therefore missing; why, and the remedies


def tallies(scores: Sequence[PastScore]) -> list[Tally]:
    """Return sums over the latest score of each trajectory."""
    latest = {scored.trajectory_id: scored for scored in sorted(scores, key=lambda one: one.judged_at)}
    sums: dict[tuple[int, str, str], list[float]] = defaultdict(list)
    for scored in latest.values():
        sums[scored.version, scored.family, scored.cohort].append(scored.score)
    return [
        Tally(
            version=version, family=family, cohort=cohort, sums=sums_of(values), least=min(values), largest=max(values)
        )
        for (version, family, cohort), values in sums.items()
    ]


def learning_report(
    rows: Sequence[Tally], newest_first: Sequence[Movement] = (), left_out: Collection[int] = ()
) -> LearningReport:
    """Return the report.

    `newest_first`: how far the last rounds moved the policy; `left_out`: versions that are in the curve alone.
    """
    scored, reach = _grouped(rows, lambda one: one.version), _reach(rows)
    curve = tuple(_version_score(version, scored[version], reach) for version in sorted(scored))
    versions = {version: found for version, found in scored.items() if version not in left_out}
    if len(versions) < 2:
        served = f"only version {next(iter(versions))} has any" if versions else "none has any"
        return LearningReport((), curve, f"two versions need scores; {served}")
    sides = _sides(versions)
    if sides is None:
        count = sum(_sums(one).count for one in versions.values())
        needed = f"each side needs {MIN_SCORES_PER_SIDE} scores"
        return LearningReport((), curve, f"{needed}; there are {count} in all, {_lacking(versions)} are missing")
    before, after = sides
    names = sorted({one.family for one in before} & {one.family for one in after})
    reports = [_report(ALL_FAMILIES, before, after, reach)]
    if len(names) > 1:
        reports += [
            _report(n, [x for x in before if x.family == n], [x for x in after if x.family == n], reach) for n in names
        ]
    compared = [one for one in curve if one.version in versions]
    notes = tuple(_notes(reports[0], compared, newest_first))
    if unreleased := ", ".join(f"@{version}" for version in sorted(scored.keys() - versions.keys())):
        notes += (f"left out: {unreleased}, rejected or in a ramp",)
    return LearningReport(tuple(reports), curve, None, notes)


def relative_report() -> LearningReport:
    """Return the report for relative scores, whose means cannot be compared across versions."""
    return LearningReport((), (), RELATIVE_SCORES_NOTE)


def to_dict(report: LearningReport) -> dict[str, Any]:
    """Return the report as JSON values."""
    content = asdict(report)
    for rows, family in zip(content["families"], report.families, strict=True):
        rows["gain"]["verdict"] = family.gain.verdict
        if family.same_tasks is not None:
            rows["same_tasks"]["verdict"] = family.same_tasks.verdict
    return content


def _grouped(rows: Iterable[Tally], key: Callable[[Tally], _Key]) -> dict[_Key, list[Tally]]:
    groups: dict[_Key, list[Tally]] = {}
    for one in rows:
        groups.setdefault(key(one), []).append(one)
    return groups


def _sides(versions: Mapping[int, list[Tally]]) -> tuple[list[Tally], list[Tally]] | None:
    """Return the scores of both sides, collected from both ends; None if they would overlap."""
    order = sorted(versions)
    before: list[Tally] = []
    after: list[Tally] = []
    while order and _sums(before).count < MIN_SCORES_PER_SIDE:
        before += versions[order.pop(0)]
    while order and _sums(after).count < MIN_SCORES_PER_SIDE:
        after += versions[order.pop()]
    return (before, after) if min(_sums(before).count, _sums(after).count) >= MIN_SCORES_PER_SIDE else None


def _lacking(versions: Mapping[int, list[Tally]]) -> int:
    """Return the number of missing scores for two sides, with each version on one of them."""
    order = sorted(versions)
    before = 0
    while order and before < MIN_SCORES_PER_SIDE:
        before += _sums(versions[order.pop(0)]).count
    after = sum(_sums(versions[version]).count for version in order)
    return max(0, MIN_SCORES_PER_SIDE - before) + max(0, MIN_SCORES_PER_SIDE - after)


def _reach(rows: Sequence[Tally]) -> Range:
    """Return the range of scores, judged from those seen."""
    least, largest = min((one.least for one in rows), default=0.0), max((one.largest for one in rows), default=1.0)
    if least >= 0 and largest <= 1:
        return 0.0, 1.0
    return (least, largest) if least < largest else (least - 0.5, least + 0.5)


def _report(family: str, before: Sequence[Tally], after: Sequence[Tally], reach: Range) -> FamilyReport:
    gain = _difference(before, after, reach)
    errors, count = _squared_errors(before, after, reach), _sums(after).count
    more = more_scores(gain.value, *errors, count, _Z) if gain.verdict == "unknown" else None
    return FamilyReport(family, _side(before), _side(after), gain, _same_tasks(before, after, reach), more)


def _side(rows: Sequence[Tally]) -> Side:
    versions, sums = [one.version for one in rows], _sums(rows)
    return Side(min(versions), max(versions), sums.count, sums.mean)


def _difference(before: Sequence[Tally], after: Sequence[Tally], reach: Range) -> Gain:
    sides = [_sums(before), _sums(after)]
    gain = sides[1].mean - sides[0].mean
    width = reach[1] - reach[0]
    error = _Z * math.sqrt(sum(_squared_errors(before, after, reach)))
    return Gain(gain, max(-width, gain - error), min(width, gain + error), sides[0].count + sides[1].count)


def _squared_errors(before: Sequence[Tally], after: Sequence[Tally], reach: Range) -> tuple[float, float]:
    """Return the squared standard errors of both means."""
    width, middle = reach[1] - reach[0], (reach[0] + reach[1]) / 2
    one, other = (squared_error(_sums(side).around(middle), width / 2) for side in (before, after))
    return one, other


def _same_tasks(before: Sequence[Tally], after: Sequence[Tally], reach: Range) -> Gain | None:
    """Return the mean gain over the tasks on both sides."""
    sides = [_grouped(side, lambda one: one.cohort) for side in (before, after)]
    gains = [_sums(sides[1][task]).mean - _sums(sides[0][task]).mean for task in sides[0] if task in sides[1]]
    if len(gains) < 2:
        return None
    low, high = interval(gains, reach[1] - reach[0])
    return Gain(statistics.fmean(gains), low, high, len(gains))


def _version_score(version: int, rows: Sequence[Tally], reach: Range) -> VersionScore:
    sums, middle = _sums(rows), (reach[0] + reach[1]) / 2
    low, high = interval_of(sums.around(middle), (reach[1] - reach[0]) / 2)
    return VersionScore(version, sums.count, sums.mean, middle + low, middle + high)


def _sums(rows: Iterable[Tally]) -> Sums:
    parts = [one.sums for one in rows]
    totals, squares = math.fsum(part.total for part in parts), math.fsum(part.squares for part in parts)
    return Sums(sum(part.count for part in parts), totals, squares)
