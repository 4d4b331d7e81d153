"""The grader of docs/judges.md runs as it stands there, and the trainer's HTTP judge gets its scores from it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from ratchet.store.records import Transcript
from ratchet.trainer.judges.kinds.http_grader import GraderJudge
from ratchet.trainer.settings.judge_specs import GraderSpec
from tests import house
from tests.harness.cli.project import wait_for
from tests.harness.ports import free_port
from tests.trainer.test_ruler import member


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """Where the page's grader answers."""
    (code,) = re.findall(r"```python\n(# grader\.py.*?)```", (house.ROOT / "docs" / "judges.md").read_text(), re.DOTALL)
    (tmp_path / "grader.py").write_text(code)
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "grader.py"), str(port)],
        env=os.environ | {"RATCHET_GRADER_SECRET": "s3cret"}, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    address = f"http://127.0.0.1:{port}/grade"
    try:
        wait_for("the grader answers", lambda: _answers(address))
        yield address
    finally:
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.post(url, json={}, trust_env=False).status_code == 401
    except httpx.TransportError:
        return False


def answered(text: str, **row: str) -> Transcript:
    messages = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": text}]
    return msgspec.structs.replace(member("t", messages), row=row or None)


def test_the_grader_of_the_page_scores_and_refuses_what_it_cannot_judge(url: str) -> None:
    judge = GraderJudge(GraderSpec(kind="http", url=url), "s3cret")
    members = [answered("oslo.", answer="Oslo"), answered("not Oslo", answer="Oslo"), answered("Oslo")]
    found = judge.judge("g", members).verdicts
    judge.close()
    assert [verdict.score for verdict in found] == [1.0, 0.0, None]
    assert (found[0].explanation, found[0].components) == ("expected Oslo", {"right": 1.0})
    assert "status 422" in str(found[2].failure)


def test_another_secret_gets_no_score(url: str) -> None:
    judge = GraderJudge(GraderSpec(kind="http", url=url), "another")
    (found,) = judge.judge("g", [answered("It is Oslo.", answer="Oslo")]).verdicts
    judge.close()
    assert found.score is None
    assert "401" in str(found.failure)
