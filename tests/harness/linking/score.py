"""Precision and recall of linking, per kind of traffic: true trajectories against stored ones. Pure.

Pairwise over calls. Precision: of the pairs stored in one trajectory, the share that truly belong to one. Recall: of
the pairs that truly belong to one trajectory, the share stored in one. Parents: the share of calls whose stored parent
and choice are the true ones ("no parent" counts as a value).

If trajectories are indistinguishable because all their messages are equal, the truth is taken up to the permutation
that fits best: calls with equal bodies are exchanged among trajectories whose earlier calls had equal bodies. Two
trajectories merged into one, or one split into two, are wrong under every permutation.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import comb


@dataclass(frozen=True)
class TrueCall:
    """One call as it was made. `before` is the label of the call whose choice `choice` it continues.

    `abandoned`: its client disconnected; it may never have reached the proxy.
    """

    label: str
    kind: str
    run: str
    before: str | None
    choice: int
    body: str  # equal for calls that cannot be distinguished
    turn: int
    abandoned: bool = False


@dataclass(frozen=True)
class StoredCall:
    """One call as the proxy stored it; `before` is its parent's label."""

    trajectory: str
    before: str | None
    choice: int
    linked_by: str


@dataclass(frozen=True)
class LinkingScore:
    """The metrics of one kind."""

    kind: str
    calls: int
    runs: int
    trajectories: int
    precision: float
    recall: float
    parents: float
    linked_by: Mapping[str, int]
    missing: int  # calls that are not in the store


def score_kinds(
    truths: Sequence[TrueCall], stored: Mapping[str, StoredCall], alike: Iterable[str] = ()
) -> list[LinkingScore]:
    """Return the score of each kind, in order of their first call; `alike` names the kinds whose trajectories are
    exchangeable.
    """
    kinds: dict[str, list[TrueCall]] = defaultdict(list)
    for truth in truths:
        if truth.label in stored or not truth.abandoned:
            kinds[truth.kind].append(truth)
    exchangeable = set(alike)
    settled = {k: _permuted(calls, stored) if k in exchangeable else list(calls) for k, calls in kinds.items()}
    clusters: dict[str, Counter[str]] = defaultdict(Counter)
    for calls in settled.values():
        for call in calls:
            if call.label in stored:
                clusters[stored[call.label].trajectory][f"{call.kind}/{call.run}"] += 1
    return [_score(kind, calls, stored, clusters) for kind, calls in settled.items()]


def _score(
    kind: str, calls: Sequence[TrueCall], stored: Mapping[str, StoredCall], clusters: Mapping[str, Counter[str]]
) -> LinkingScore:
    found = [call for call in calls if call.label in stored]
    ours = {stored[call.label].trajectory for call in found}
    together = sum(comb(clusters[name].total(), 2) for name in ours)
    right = sum(comb(count, 2) for name in ours for run, count in clusters[name].items() if run.startswith(kind + "/"))
    foreign = sum(comb(_foreign(kind, clusters[name]), 2) for name in ours)
    sizes = Counter(call.run for call in calls)
    true_pairs = sum(comb(size, 2) for size in sizes.values())
    good = sum((stored[c.label].before, stored[c.label].choice) == (c.before, c.choice) for c in found)
    return LinkingScore(
        kind=kind,
        calls=len(calls),
        runs=len(sizes),
        trajectories=len(ours),
        precision=_share(right, together - foreign),
        recall=_share(right, true_pairs),
        parents=_share(good, len(calls)),
        linked_by=dict(Counter(stored[call.label].linked_by for call in found)),  # asdict() copies no Counter
        missing=len(calls) - len(found),
    )


def _foreign(kind: str, cluster: Counter[str]) -> int:
    return sum(count for run, count in cluster.items() if not run.startswith(kind + "/"))


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 1.0


def _permuted(calls: Sequence[TrueCall], stored: Mapping[str, StoredCall]) -> list[TrueCall]:
    """Exchange equal calls of a turn among trajectories with equal histories, to fit the stored links best."""
    past: dict[str, tuple[str, ...]] = defaultdict(tuple)  # trajectory -> bodies so far
    last: dict[str, TrueCall] = {}  # trajectory -> its previous call, after the exchange
    settled: list[TrueCall] = []
    for turn in sorted({call.turn for call in calls}):
        now = [call for call in calls if call.turn == turn]
        groups: dict[tuple[str, ...], list[TrueCall]] = defaultdict(list)
        for call in now:
            groups[(*past[call.run], call.body)].append(call)
        for group in groups.values():
            settled += _exchanged(group, last, stored)
        for call in now:
            past[call.run] += (call.body,)
        last |= {call.run: call for call in settled if call.turn == turn}
    return settled


def _exchanged(
    group: Sequence[TrueCall], last: Mapping[str, TrueCall], stored: Mapping[str, StoredCall]
) -> list[TrueCall]:
    waiting: dict[str, list[str]] = defaultdict(list)  # stored trajectory -> true ones whose previous call is in it
    for call in group:
        if call.run in last and last[call.run].label in stored:
            waiting[stored[last[call.run].label].trajectory].append(call.run)
    left, unplaced, placed = {call.run for call in group}, [], []
    for call in group:
        runs = waiting[stored[call.label].trajectory] if call.label in stored else []
        if runs:
            placed.append((call, runs.pop()))
            left.discard(placed[-1][1])
        else:
            unplaced.append(call)
    placed += zip(unplaced, sorted(left), strict=True)
    return [replace(c, run=run, before=last[run].label if run in last else c.before) for c, run in placed]
