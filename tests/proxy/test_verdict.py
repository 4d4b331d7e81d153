"""The verdict of the benchmark of failing machines finds what it is there for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.harness.linking.score import TrueCall
from tests.harness.partitions.verdict import KeptCall, judge

# Two runs of two calls: the labels are the run and the turn.
TRUTHS = [TrueCall(f"{run}{turn}", "kind", run, f"{run}0" if turn else None, 0, f"body {turn}", turn)
          for run in "ab" for turn in range(2)]  # fmt: skip
ANSWERED = {truth.label: f"id {truth.label}" for truth in TRUTHS}


def _kept(truth: TrueCall) -> KeptCall:
    return KeptCall(
        ANSWERED[truth.label], truth.label, truth.run, False, truth.before, truth.choice, "answered", "graph"
    )


KEPT = {truth.label: _kept(truth) for truth in TRUTHS}


def _violations(stored: Sequence[KeptCall], *, alike: bool = False) -> list[str]:
    return list(judge(TRUTHS, ANSWERED, stored, ["kind"] if alike else [], ["kind"]).violations)


@pytest.mark.parametrize("alike", [False, True])
def test_what_is_right_or_marked_is_no_violation(alike: bool) -> None:
    marked = replace(KEPT["a1"], trajectory="c", before=None, is_marked=True)
    for stored in (KEPT, KEPT | {"a1": marked}):
        assert _violations(list(stored.values()), alike=alike) == []
    verdict = judge(TRUTHS, ANSWERED, list((KEPT | {"a1": marked}).values()), [], ["kind"])
    assert (verdict.precision, verdict.recall, verdict.marked) == (1, 1, 0.25)


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize(
    ("label", "changed", "words"),
    [
        ("a1", {"trajectory": "c", "before": None}, "has parent None/0"),  # split, and not marked
        ("a1", {"trajectory": "b", "before": "b0"}, "merges runs"),
        ("a1", {"trajectory": "b", "before": "b0", "is_marked": True}, "merges runs"),
        ("a1", {"state": "interrupted"}, "is stored as interrupted"),
        ("a1", {"id": "another id"}, "is not stored"),
    ],
)
def test_a_broken_promise_is_found(alike: bool, label: str, changed: dict[str, object], words: str) -> None:
    stored = KEPT | {label: replace(KEPT[label], **changed)}  # type: ignore[arg-type]
    assert words in "; ".join(_violations(list(stored.values()), alike=alike))


def test_a_call_that_is_stored_twice_is_found() -> None:
    assert _violations([*KEPT.values(), replace(KEPT["a1"], id="another id")]) == ["a1 is stored 2 times"]


def test_calls_with_equal_bodies_may_be_exchanged_between_runs_that_are_alike() -> None:
    exchanged = {"a1": replace(KEPT["a1"], trajectory="b", before="b0")}
    exchanged["b1"] = replace(KEPT["b1"], trajectory="a", before="a0")
    assert _violations(list((KEPT | exchanged).values()), alike=True) == []
    assert _violations(list((KEPT | exchanged).values()))


def test_an_attempt_whose_client_has_no_answer_may_stand_alone() -> None:
    lost = TrueCall("a2", "kind", "a", "a0", 0, "body 1", 2)
    alone = replace(KEPT["a1"], id="id a2", label="a2", trajectory="c", before=None)
    verdict = judge([*TRUTHS, lost], ANSWERED, [*KEPT.values(), alone], [], ["kind"])
    assert verdict.violations == []
