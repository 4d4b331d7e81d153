"""Every reason for not training something has a meaning and a remedy, in words and on the page."""

from __future__ import annotations

import re
from pathlib import Path

from ratchet import workflow_doctor
from ratchet.store.deletion import MEMBER_GONE
from ratchet.store.reporting import reasons
from ratchet.store.states import CallState
from ratchet.trainer import backlog, grouping, school, scorekeeper
from ratchet.trainer.learning import rows
from tests import house


def test_every_reason_of_a_drop_is_explained() -> None:
    given = {
        grouping.EVALUATION, grouping.CUT_OFF, grouping.SINGLE, scorekeeper.JUDGE_FAILED, scorekeeper.NO_VARIANCE,
        scorekeeper.BASELINE, school.UNTRAINABLE, school.DIVERGED, backlog.STALE, backlog.TOO_FEW_LEFT,
    }  # fmt: skip
    assert given | {workflow_doctor._DROPPED, MEMBER_GONE} <= set(reasons.DROPPED)


def test_every_reason_of_a_token_is_explained() -> None:
    source = Path(rows.__file__).read_text()
    given = set(re.findall(r'(?:return|untrained\[)\s*"([a-z ]+)"', source)) | set(CallState) - {CallState.ANSWERED}
    assert {"greedy", "no ids"} <= given
    assert given | {rows._ANSWER_LOST, rows.TRUNCATED} <= set(reasons.LEFT_OUT)


def test_the_page_shows_the_same_reasons() -> None:
    page = (house.ROOT / "docs" / "sentinel.md").read_text()
    told = dict(re.findall(r"^\| `([^`]+)` \| (.+) \|$", page, re.MULTILINE))
    known = {**reasons.DROPPED, **reasons.LEFT_OUT}
    assert {name: told.get(name) for name in known} == known
