"""What must hold after failures, from the calls as they were made and as they are stored. Pure.

- A call whose answer its client has is stored once, as answered.
- It is linked right, or marked: it belongs to a trajectory of the purpose `unlinked`, which is not trained.
- No trajectory, marked or not, has calls of two runs.

Of the trajectories of one run, only one may be unmarked, and the parents in it are the true ones. Traffic without
enough evidence to link it is checked for wrong parents only where the truth has one. In kinds whose trajectories are
`alike`, calls with equal bodies may be exchanged: a parent is right if its body is, and two answered calls with equal
bodies in one trajectory are of two runs. Attempts whose client has no answer are dead ends: they may stand alone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import comb

from tests.harness.linking.score import TrueCall

ANSWERED, STARTED = "answered", "started"


@dataclass(frozen=True)
class KeptCall:
    """One call as it is stored; `before` is its parent's label. `is_marked`: its trajectory is not trained."""

    id: str
    label: str
    trajectory: str
    is_marked: bool
    before: str | None
    choice: int
    state: str
    linked_by: str


@dataclass(frozen=True)
class FailureVerdict:
    """Precision over all calls and recall over unmarked ones, pairwise, of the kinds that are not alike."""

    precision: float
    recall: float
    marked: float
    violations: Sequence[str]


def judge(
    truths: Sequence[TrueCall],
    answered: Mapping[str, str],
    stored: Sequence[KeptCall],
    alike: Collection[str],
    evidence: Collection[str],
) -> FailureVerdict:
    """Return the verdict. `answered`: the ids of the answered calls by label; `alike`, `evidence`: names of kinds."""
    by_label = {call.label: call for call in stored}
    known = {truth.label: truth for truth in truths}
    received = [truth for truth in truths if truth.label in answered and truth.label in by_label]
    settled = [truth for truth in received if not truth.abandoned]
    violations = [
        *_lost(answered, stored),
        *_merged(settled, by_label, alike),
        *_split(settled, by_label, alike, evidence),
        *_wrong_parents(settled, by_label, known, alike, evidence),
    ]
    exact = [truth for truth in settled if truth.kind not in alike]
    linked = [truth for truth in exact if truth.kind in evidence and not by_label[truth.label].is_marked]
    marked = sum(by_label[truth.label].is_marked for truth in settled) / max(1, len(settled))
    places = [(by_label[truth.label].trajectory, _run(truth)) for truth in exact]
    precision = _pairs(places) / max(1, _pairs([place for place, _ in places]))
    unmarked = [(by_label[truth.label].trajectory, _run(truth)) for truth in linked]
    recall = _pairs(unmarked) / max(1, _pairs([run for _, run in unmarked]))
    return FailureVerdict(precision, recall, marked, violations)


def _pairs(groups: Sequence[object]) -> int:
    return sum(comb(count, 2) for count in Counter(groups).values())


def _run(truth: TrueCall) -> str:
    return f"{truth.kind}/{truth.run}"


def _lost(answered: Mapping[str, str], stored: Sequence[KeptCall]) -> Iterator[str]:
    copies = Counter(call.label for call in stored)
    yield from (f"{label} is stored {count} times" for label, count in copies.items() if count > 1)
    by_id = {call.id: call for call in stored}
    for label, name in answered.items():
        call = by_id.get(name)
        if call is None or call.label != label:
            yield f"{label} ({name}) was answered and is not stored"
        elif call.state != ANSWERED:
            yield f"{label} ({name}) was answered and is stored as {call.state}"
    yield from (f"{call.label} ({call.id}) is stored as unfinished" for call in stored if call.state == STARTED)


def _merged(settled: Sequence[TrueCall], stored: Mapping[str, KeptCall], alike: Collection[str]) -> Iterator[str]:
    members: dict[str, list[TrueCall]] = defaultdict(list)
    for truth in settled:
        members[stored[truth.label].trajectory].append(truth)
    for name, calls in members.items():
        if {call.kind for call in calls} & set(alike):
            bodies = Counter((call.kind, call.body) for call in calls)
            wrong = max(bodies.values()) > 1 or len({call.kind for call in calls}) > 1
        else:
            wrong = len({_run(call) for call in calls}) > 1
        if wrong:
            ways = [f"{call.run} {call.label} {stored[call.label].linked_by}" for call in calls]
            yield f"{name} merges runs of {calls[0].kind}: {'; '.join(ways)}"


def _split(
    settled: Sequence[TrueCall], stored: Mapping[str, KeptCall], alike: Collection[str], evidence: Collection[str]
) -> Iterator[str]:
    places: dict[str, dict[str, str]] = defaultdict(dict)
    for truth in settled:
        call = stored[truth.label]
        if truth.kind in evidence and truth.kind not in alike and not call.is_marked:
            places[_run(truth)].setdefault(call.trajectory, truth.label)
    for run, found in places.items():
        if len(found) > 1:
            yield f"{run} is in {len(found)} unmarked trajectories: {found}"


def _wrong_parents(
    settled: Sequence[TrueCall],
    stored: Mapping[str, KeptCall],
    known: Mapping[str, TrueCall],
    alike: Collection[str],
    evidence: Collection[str],
) -> Iterator[str]:
    for truth in settled:
        call = stored[truth.label]
        if call.is_marked or truth.kind not in evidence:
            continue
        wanted, found = truth.before, call.before
        if truth.kind in alike:
            wanted, found = (known[name].body if name else None for name in (wanted, found))
        if (wanted, truth.choice) != (found, call.choice):
            way = f"linked by {call.linked_by} in {call.trajectory}"
            yield f"{_run(truth)}: {truth.label} has parent {call.before}/{call.choice}, not {truth.before}; {way}"
