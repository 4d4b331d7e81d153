"""A judge function of this process, called by the HTTP judge of another one."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

import ratchet
from ratchet.api.try_out import transcript_of
from ratchet.store.records import Verdict
from ratchet.trainer.controller.judges.kinds.function import FunctionJudge
from ratchet.trainer.controller.judges.kinds.http_grader import GraderJudge
from ratchet.trainer.controller.judges.make_judge import make_judge
from ratchet.trainer.settings.judge_specs import read_spec
from ratchet.tuning.judge_server import JudgeServer

TRANSCRIPT = transcript_of({"question": "How many?"}, ratchet.WorkflowOutput("three"), ())


def ask(function: Any) -> Verdict:
    """Return the verdict of a function that is served."""
    judge = FunctionJudge(function)
    with JudgeServer(judge) as server:
        grader = make_judge(read_spec(server.spec), {})
        assert isinstance(grader, GraderJudge)
        try:
            (verdict,) = grader.judge("grp_1", [TRANSCRIPT]).verdicts
        finally:
            grader.close()
            judge.close()
    return verdict


def test_a_function_gets_what_it_gets_in_the_trainer() -> None:
    values: list[dict[str, Any]] = []

    async def judge(trajectory: dict[str, Any], response: str, task: Any, tool_outcomes: list[Any]) -> dict[str, Any]:
        values.append({"trajectory": trajectory, "response": response, "task": task, "tool_outcomes": tool_outcomes})
        return {"score": 0.5, "components": {"length": len(response)}, "explanation": "half"}

    verdict = ask(judge)
    assert (verdict.score, verdict.explanation) == (0.5, "half")
    assert set(verdict.components) == {"length"}
    here: list[dict[str, Any]] = []

    def keep(**given: Any) -> float:
        here.append(given)
        return 0.0

    FunctionJudge(keep).judge("grp_1", [TRANSCRIPT])
    assert values == here


def test_a_failure_of_the_function_is_a_failure_and_is_not_retried() -> None:
    calls: list[str] = []

    def judge(response: str) -> float:
        calls.append(response)
        raise ValueError("cannot count")

    verdict = ask(judge)
    assert verdict.score is None
    assert verdict.failure is not None
    assert "ValueError: cannot count" in verdict.failure
    assert len(calls) == 1


@pytest.mark.parametrize(("path", "status"), [("/other", 404), ("", 413)])
def test_another_path_and_a_body_without_a_length_are_refused(path: str, status: int) -> None:
    with JudgeServer(FunctionJudge(lambda response: float(len(response)))) as server:
        url = server.spec["url"]
        address = url.rpartition("/")[0] + path if path else url
        content = iter([b"{}"]) if not path else b"{}"  # an iterator is sent in chunks, without a length
        answer = httpx.post(address, content=content, trust_env=False)
    assert answer.status_code == status
