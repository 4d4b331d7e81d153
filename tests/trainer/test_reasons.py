"""Every reason for not training something has a meaning and a remedy, in words and on the page."""

from __future__ import annotations

import re
from pathlib import Path

from ratchet.checks import workflow_check
from ratchet.store.deletion.deletion import MEMBER_DELETED
from ratchet.store.reports import drop_reasons
from ratchet.store.states import CallState
from ratchet.trainer.controller.collect import grouping
from ratchet.trainer.controller.judging import judge_runner
from ratchet.trainer.controller.rounds import backlog, round_runner
from ratchet.trainer.rows import build_rows
from tests import house


def test_every_reason_of_a_drop_is_explained() -> None:
    given = {
        grouping.EVALUATION, grouping.CUT_OFF, grouping.SINGLE, judge_runner.JUDGE_FAILED, judge_runner.NO_VARIANCE,
        judge_runner.BASELINE, round_runner.UNTRAINABLE, round_runner.DIVERGED, backlog.STALE, backlog.TOO_FEW_LEFT,
    }  # fmt: skip
    assert given | {workflow_check._DROPPED, MEMBER_DELETED} <= set(drop_reasons.DROPPED)


def test_every_reason_of_a_token_is_explained() -> None:
    source = Path(build_rows.__file__).read_text()
    given = set(re.findall(r'(?:return|untrained\[)\s*"([a-z ]+)"', source)) | set(CallState) - {CallState.ANSWERED}
    assert {"greedy", "no ids"} <= given
    assert given | {build_rows._ANSWER_LOST, build_rows.TRUNCATED} <= set(drop_reasons.LEFT_OUT)


def test_the_page_shows_the_same_reasons() -> None:
    page = (house.ROOT / "docs" / "sentinel.md").read_text()
    told = dict(re.findall(r"^\| `([^`]+)` \| (.+) \|$", page, re.MULTILINE))
    known = {**drop_reasons.DROPPED, **drop_reasons.LEFT_OUT}
    assert {name: told.get(name) for name in known} == known
