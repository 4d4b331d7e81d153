"""Every reason for not training something has a meaning and a remedy, in the code and in the documentation."""

from __future__ import annotations

import re
from pathlib import Path

from ratchet.store.reasons import UNTRAINED, DropReason
from ratchet.store.states import CallState
from ratchet.trainer.rows import build_rows
from tests import house


def test_every_reason_of_an_untrained_token_is_explained() -> None:
    source = Path(build_rows.__file__).read_text()
    given = set(re.findall(r'(?:return|untrained\[)\s*"([a-z_]+)"', source)) | set(CallState) - {CallState.ANSWERED}
    assert {"greedy", "no_token_ids"} <= given
    assert given | {build_rows._ANSWER_LOST, build_rows.TRUNCATED} <= set(UNTRAINED)


def test_the_documentation_lists_the_same_reasons() -> None:
    page = (house.ROOT / "docs" / "sentinel.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \| (.+) \|$", page, re.MULTILINE)
    assert {(str(reason), reason.meaning) for reason in DropReason} <= set(rows)
    assert set(UNTRAINED.items()) <= set(rows)
