"""OpenJudge's graders as judges: the real package in an environment of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ratchet.store.records import Transcript, Verdict
from ratchet.trainer.errors import JudgeError
from ratchet.trainer.judges.judgement import Judge
from ratchet.trainer.judges.make_judge import make_judge
from ratchet.trainer.settings.judge_specs import read_spec
from tests.harness.chat_models import ScriptedModel, says
from tests.harness.clients.program import HOME, SKIP
from tests.trainer.test_ruler import member

OWN = "plugins.openjudge.tests.own_graders"
DESCRIPTION = '{"parameters": [], "needed": [], "mode": "pointwise", "source": "x"}'
STRINGS = "openjudge.graders.text.string_match:StringMatchGrader"
_made: list[Judge] = []


@pytest.fixture(autouse=True)
def _close() -> Iterator[None]:
    yield
    while _made:
        _made.pop().close()


def made(grader: str, environ: dict[str, str] | None = None, **settings: Any) -> Judge:
    """The judge of a grader in its own environment."""
    if os.environ.get(SKIP):
        pytest.skip(f"{SKIP} is set")
    python = HOME / "openjudge" / "bin" / "python"
    assert python.exists(), "run `make clients`"
    spec = read_spec({"kind": "openjudge", "grader": grader, "python": str(python), **settings})
    _made.append(make_judge(spec, {"PATH": os.environ["PATH"], **(environ or {})}))
    return _made[-1]


def answered(text: str, **row: Any) -> Transcript:
    """Return a trajectory that ends with an answer, of a task with a row."""
    chat = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": text}]
    return msgspec.structs.replace(member(f"t-{text}", chat), row=row or None)


def verdicts(judge: Judge, members: Sequence[Transcript]) -> list[Verdict]:
    return list(judge.judge("g", members).verdicts)


@pytest.mark.clients
def test_a_grader_of_the_package_reads_the_response_and_a_column_of_the_task() -> None:
    judge = made(STRINGS, settings={"algorithm": "substring_match"}, columns={"reference_response": "answer"})
    members = [answered("It is in Oslo.", answer="Oslo"), answered("No idea", answer="Oslo"), answered("Oslo")]
    found = verdicts(judge, members)
    assert [verdict.score for verdict in found] == [1.0, 0.0, None]
    assert "no column 'answer'" in str(found[2].failure)
    assert judge.name == "openjudge:StringMatchGrader"
    assert judge.version != made(STRINGS, settings={"algorithm": "exact_match"}).version


@pytest.mark.clients
def test_a_grader_that_asks_a_model_is_put_on_the_scale_from_0_to_1() -> None:
    with ScriptedModel() as model:
        model.answers = [says({"reason": "close", "score": 4})]
        judge = made(
            "openjudge.graders.common.correctness:CorrectnessGrader", {"RATCHET_JUDGE_API_KEY": "sk-grader"},
            settings={"model": {"model": "big", "base_url": f"{model.url}/v1"}},
            columns={"reference_response": "answer"}, worst=1, best=5,
        )  # fmt: skip
        (found,) = verdicts(judge, [answered("Oslo, I think", answer="Oslo")])
        assert (found.score, found.explanation) == (0.75, "close")
        assert "Oslo, I think" in str(model.requests[0]["messages"])
        assert model.headers[0]["authorization"] == "Bearer sk-grader"


@pytest.mark.clients
def test_a_graders_error_is_a_failure_and_never_a_score() -> None:
    judge = made(f"{OWN}:Stars", worst=0, best=5)
    found = verdicts(judge, [answered(text) for text in ("raise", "error", "*" * 9, "**")])
    assert [verdict.score for verdict in found] == [None, None, None, 0.4]
    assert "the grader's own error" in str(found[0].failure)
    assert "no model" in str(found[1].failure)
    assert "9 is not between 0 and 5" in str(found[2].failure)
    assert found[3].explanation == "0 tool calls"


@pytest.mark.clients
def test_a_grader_that_fails_gives_no_full_score() -> None:
    (broken,) = verdicts(made(f"{OWN}:BreaksOff"), [answered("4")])
    assert (broken.score, broken.failure) == (None, "no finite score: Exception occurred")
    (configured,) = verdicts(made(f"{OWN}:BreaksOff", settings={"timeout_score": 0.5}), [answered("4")])
    assert configured.score == 0.5


@pytest.mark.clients
def test_a_grader_of_mathematics_knows_equal_expressions() -> None:
    judge = made("openjudge.graders.math:MathExpressionVerifyGrader", columns={"reference_response": "answer"})
    found = verdicts(judge, [answered("$x^2$", answer="$x*x$"), answered("7", answer="8")])
    assert [verdict.score for verdict in found] == [1.0, 0.0]


@pytest.mark.clients
def test_a_grader_that_hangs_is_ended_and_restarted_the_next_time() -> None:
    judge = made(f"{OWN}:Stars", timeout_seconds=5.0, best=5)
    (hung,) = verdicts(judge, [answered("hang")])
    assert "did not respond within 5 s" in str(hung.failure)
    assert [verdict.score for verdict in verdicts(judge, [answered("*****")])] == [1.0]


@pytest.mark.clients
@pytest.mark.parametrize(
    ("grader", "settings", "message"),
    [
        ("openjudge.graders.text.string_match:NoSuch", {}, "no attribute 'NoSuch'"),
        (STRINGS, {"settings": {"algorithm": "guess"}}, "Unknown self.algorithm"),
        (f"{OWN}:Ranks", {}, "it ranks groups"),
        ("openjudge.graders.math:MathExpressionVerifyGrader", {}, "needs reference_response"),
    ],
)
def test_a_grader_that_cannot_be_used_is_reported_at_the_start(
    grader: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(JudgeError, match=message):
        made(grader, **settings)


def test_without_the_package_the_error_names_the_remedy() -> None:
    spec = read_spec({"kind": "openjudge", "grader": STRINGS, "python": Path(sys.executable)})
    with pytest.raises(JudgeError, match=r"set `python` to an environment that has py-openjudge"):
        make_judge(spec, dict(os.environ))


def test_a_wrong_setting_is_named() -> None:
    with pytest.raises(JudgeError, match=r"judge openjudge: grader: Field required; colums: Extra inputs"):
        make_judge(read_spec({"kind": "openjudge", "colums": {}}), {})


def test_an_answer_that_is_cut_off_is_a_failure(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        f"#!/bin/sh\nread request\necho '{DESCRIPTION}'\nread request\nprintf '{{\"opinions\": [{{\"sco'\n"
    )
    python.chmod(0o700)
    judge = make_judge(read_spec({"kind": "openjudge", "grader": "any:Grader", "python": str(python)}), {})
    try:
        verdicts = judge.judge(None, [member("a", []), member("b", [])]).verdicts
    finally:
        judge.close()
    assert [verdict.score for verdict in verdicts] == [None, None]
    assert all("the grader's process exited" in str(verdict.failure) for verdict in verdicts)
