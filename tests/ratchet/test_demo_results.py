"""The demo's figures of behaviour: what the agent did, from the rows that it writes."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from ratchet.demo import demo_report
from ratchet.demo.behaviour import behaviour_of
from ratchet.demo.demo_results import (
    DemoResults,
    Evaluations,
    HeldOutEvaluation,
    VersionRow,
    read_evaluation,
    read_results,
)
from ratchet.demo.email_search.hard_tasks import NEW_NAMES, TWO_HOPS
from ratchet.store.store import open_store
from tests.harness.records import judged_group

SEARCH, READ, ANSWER = "search_inbox", "read_email", "return_final_answer"


def written(folder: Path, sampled: list[dict[str, Any]], greedy: list[dict[str, Any]]) -> HeldOutEvaluation:
    """The evaluation of results as the agent writes them."""
    for name, rows in {"sampled": sampled, "greedy": greedy}.items():
        (folder / name).write_text("".join(json.dumps(one) + "\n" for one in rows))
    return read_evaluation("m@0", folder / "sampled", folder / "greedy")


def row(*tools: str, end: str = "answer", success: bool = False, task: str = "t") -> dict[str, Any]:
    """A row of the agent's results."""
    return {
        "tools": list(tools), "mails_read": tools.count(READ), "end": end, "success": success, "task_id": task,
        "turns": len(tools), "tool_failures": {}, "completion_tokens": 9,
    }  # fmt: skip


def test_an_answer_counts_as_read_only_if_a_mail_was_opened_before() -> None:
    rows = [row(SEARCH, ANSWER), row(SEARCH, ANSWER), row(SEARCH, READ, ANSWER), row(SEARCH, READ, end="text")]
    seen = behaviour_of(rows)
    assert (seen.rollouts, seen.answered, seen.mails_read) == (4, 0.75, 0.5)
    assert seen.read_before_answer == pytest.approx(1 / 3)
    assert seen.tools == {READ: 0.5, ANSWER: 0.75, SEARCH: 1.0}


def test_the_commonest_sequences_say_how_a_rollout_without_an_answer_ended() -> None:
    rows = [row(SEARCH, ANSWER), row(SEARCH, end="text"), row(SEARCH, end="text"), row(end="api_error")]
    assert behaviour_of(rows).sequences == {
        "search_inbox > (text)": 0.5,
        "search_inbox > return_final_answer": 0.25,
        "(api_error)": 0.25,
    }


def test_no_rollouts_have_no_behaviour() -> None:
    assert behaviour_of([]).read_before_answer == 0.0


def test_an_evaluation_has_an_interval_for_greedy_and_the_hard_set_by_kind(tmp_path: Path) -> None:
    right = row(SEARCH, READ, ANSWER, success=True, task=f"{NEW_NAMES}-city-Imran-audit")
    wrong = row(SEARCH, ANSWER, task=f"{TWO_HOPS}-city-Alice-audit")
    found = written(tmp_path, [right, wrong, wrong], [wrong, wrong])
    assert found.success_by_kind == {NEW_NAMES: 1.0, TWO_HOPS: 0.0}
    assert (found.greedy_success, found.greedy_low) == (0.0, 0.0)
    assert 0.5 < found.greedy_high < 0.8
    assert found.behaviour.mails_read == pytest.approx(1 / 3)
    assert found.greedy_behaviour.mails_read == 0.0


def test_the_report_shows_the_change_in_behaviour_and_the_hard_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hasty, careful = row(SEARCH, ANSWER), row(SEARCH, READ, ANSWER, success=True)
    before, after = written(tmp_path, [hasty] * 9, [hasty]), written(tmp_path, [careful] * 9, [careful])
    hard = written(tmp_path, [{**hasty, "task_id": f"{TWO_HOPS}-x"}], [hasty])
    version = VersionRow("m@0", 9, 0.0, 0.0, 2.0, 9.0, 9.0, 0.0, behaviour_of([hasty] * 9))
    figures = DemoResults(
        seed=1, base_model="m", dtype="auto", release_policy="immediate", before=before, after=after, hard_before=hard,
        hard_after=hard, curve=(), versions=(version,), rounds=(),
        swaps=1, versions_proven=1, calls=9, failed_calls=0, mixed_version_trajectories=0,
        exact_context_share=1.0, tokens_trained=9, tokens_trained_from_engine=9, tokens_left_out={}, dropped={},
        mismatch_mean=0.0, seconds={"total": 1.0},
    )  # fmt: skip
    demo_report.show(figures)
    shown = capsys.readouterr().out
    assert "likeliest behaviour: 0.0% -> 100.0% right; a mail is read before 0% -> 100% of the answers" in shown
    assert "search_inbox > read_email > return_final_answer 100%" in shown
    assert "release policy immediate: a proven version is live at once" in shown
    assert f"hard set, never trained: {TWO_HOPS} 0% -> 0%" in shown
    stored = json.loads(json.dumps(demo_report.result(figures)))
    assert stored["versions"][0]["behaviour"]["read_before_answer"] == 0.0
    assert stored["after"]["greedy_behaviour"]["mails_read"] == 1.0
    assert (stored["held_out_greedy_before"], stored["hard_success_after"]) == (0.0, 0.0)


def test_an_agent_without_tools_is_reported_by_its_answers_and_kinds_of_tasks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = {**row(task="negative-film-dull"), "answer": "positive"}
    right = {**row(task="negative-film-dull", success=True), "answer": "negative"}
    before, after = written(tmp_path, [wrong] * 3 + [right], [wrong]), written(tmp_path, [right] * 4, [right])
    version = VersionRow("m@0", 4, 0.25, 0.0, 1.0, 9.0, 2.0, 0.0, before.behaviour)
    figures = DemoResults(
        seed=2, base_model="/models/M-135M", dtype="bfloat16", release_policy="immediate", before=before, after=after,
        hard_before=None, hard_after=None, curve=((128, 0.5),), versions=(version,), rounds=(), swaps=1,
        versions_proven=1, calls=9, failed_calls=0, mixed_version_trajectories=0, exact_context_share=1.0,
        tokens_trained=9, tokens_trained_from_engine=9, tokens_left_out={}, dropped={}, mismatch_mean=0.0,
        seconds={"total": 1.0},
    )  # fmt: skip
    demo_report.show(figures)
    shown = capsys.readouterr().out
    assert "'positive' 75%, 'negative' 25%" in shown
    assert "held-out tasks by kind: negative 25% -> 100%" in shown
    assert "mail" not in shown
    demo_report.write(figures, tmp_path)
    stored = json.loads((tmp_path / "result.json").read_text())
    assert (stored["hard_success_before"], stored["dtype"], stored["versions_proven"]) == (None, "bfloat16", 1)
    assert (tmp_path / "learning_curve.png").read_bytes().startswith(b"\x89PNG")


def test_the_tokens_of_rejected_rows_are_left_out_of_those_that_vllm_sampled(tmp_path: Path, store_file: Path) -> None:
    with contextlib.closing(open_store(str(store_file))) as store:
        store.policies.register_base("agent", "m")
        group = judged_group(store, ["a", "b", "c"], [0.0, 0.5, 1.0])  # two tokens each
        held = store.rounds.start("agent", 0)
        metrics = {
            "groups": 1, "trajectories": 3, "reward": 0.5, "loss": 0.1, "seconds": 1.0, "logprob_abs_diff_mean": 0.0,
            "logprob_abs_diff_max": 0.0, "untrained_tokens": {"greedy": 1}, "rows_rejected": 1, "tokens_compared": 5,
            "tokens_trained": 3, "approx_kl": 0.01,
        }  # fmt: skip
        store.rounds.commit(held.id, version=1, checkpoint="/c/1", groups=[group.id], metrics=metrics)
        once = written(tmp_path, [row(SEARCH)], [row(SEARCH)])
        (tmp_path / "train").write_text("")
        found = read_results(
            store, alias="agent", evaluations=Evaluations(once, once, once, once), train=tmp_path / "train", seed=1,
            base_model="m", dtype="auto", release_policy="immediate", seconds={},
        )  # fmt: skip
    assert found.tokens_left_out == {"greedy": 1, "rejected": 2}
    assert found.tokens_trained_from_engine == found.tokens_trained == 3
