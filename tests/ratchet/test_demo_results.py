"""The demo's figures: what the agent did, from the rows that it writes, and what the store has of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ratchet.demo import report
from ratchet.store.store import Store, open_store
from tests.harness.records import judged_group

SEARCH, READ, ANSWER = "search_inbox", "read_email", "return_final_answer"
ABOUT = {"seed": 2, "base_model": "/models/M-135M", "dtype": "bfloat16", "release_policy": "immediate"}


def row(*tools: str, end: str = "answer", success: bool = False, task: str = "t", **more: Any) -> dict[str, Any]:
    """A row of the agent's results."""
    return {
        "tools": list(tools), "mails_read": tools.count(READ), "end": end, "success": success, "task_id": task,
        "turns": len(tools), "tool_failures": {}, "completion_tokens": 9, "prompt_tokens": 9, "models": ["agent@0"],
    } | more  # fmt: skip


def written(folder: Path, **rows: list[dict[str, Any]]) -> None:
    """Write the agent's results to files by their names."""
    for name, found in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in found))


@pytest.fixture
def store(store_file: Path) -> Iterator[Store]:
    with open_store(str(store_file)) as found:
        found.policies.register_base("agent", "m")
        yield found


def test_an_answer_counts_as_read_only_if_a_mail_was_opened_before() -> None:
    rows = [row(SEARCH, ANSWER), row(SEARCH, ANSWER), row(SEARCH, READ, ANSWER), row(SEARCH, READ, end="text")]
    seen = report.measure(rows)
    assert (seen["rollouts"], seen["mails_read"]) == (4, 0.5)
    assert seen["read_first"] == pytest.approx(1 / 3)


def test_the_commonest_sequences_say_how_a_rollout_without_an_answer_ended() -> None:
    rows = [row(SEARCH, ANSWER), row(SEARCH, end="text"), row(SEARCH, end="text"), row(end="api_error")]
    assert report.measure(rows)["commonest"] == {
        "search_inbox > (text)": 0.5,
        "search_inbox > return_final_answer": 0.25,
        "(api_error)": 0.25,
    }


def test_no_rollouts_have_no_behaviour() -> None:
    assert report.measure([])["read_first"] == 0.0


def test_an_evaluation_has_an_interval_for_greedy_and_success_by_kind(tmp_path: Path) -> None:
    right = row(SEARCH, READ, ANSWER, success=True, task="city-Imran-audit")
    wrong = row(SEARCH, ANSWER, task="month-Alice-audit")
    written(tmp_path, x_sampled=[right, wrong, wrong], x_greedy=[wrong, wrong])
    found = report.read_evaluation(tmp_path, "x")
    assert found["success_by_kind"] == {"city": 1.0, "month": 0.0}
    greedy = found["greedy"]
    assert (found["model"], greedy["success"], greedy["low"]) == ("agent@0", 0.0, 0.0)
    assert 0.5 < greedy["high"] < 0.8
    assert found["sampled"]["mails_read"] == pytest.approx(1 / 3)
    assert greedy["mails_read"] == 0.0


def test_the_report_shows_the_change_in_behaviour_and_by_kind(
    tmp_path: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    hasty, careful = row(SEARCH, ANSWER), row(SEARCH, READ, ANSWER, success=True)
    written(
        tmp_path, before_sampled=[hasty] * 9, before_greedy=[hasty], after_sampled=[careful] * 9,
        after_greedy=[careful], train=[hasty] * 9,
    )  # fmt: skip
    figures = report.read_results(store, "agent", tmp_path, ABOUT, {"train": 1.0})
    report.show(figures)
    shown = capsys.readouterr().out
    assert "likeliest behaviour: 0.0% -> 100.0% right; a mail is read before 0% -> 100% of the answers" in shown
    assert "search_inbox > read_email > return_final_answer 100%" in shown
    assert "release policy immediate: a proven version is live at once" in shown
    assert "held-out tasks by kind: t 0% -> 100%" in shown
    assert figures["versions"][0]["read_first"] == 0.0
    assert figures["after"]["greedy"]["mails_read"] == 1.0
    assert figures["before"]["greedy"]["success"] == 0.0


def test_an_agent_without_tools_is_reported_by_its_answers_and_kinds_of_tasks(
    tmp_path: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = row(task="negative-film-dull", answer="positive", turns=1)
    right = row(task="negative-film-dull", success=True, answer="negative", turns=1)
    written(
        tmp_path, before_sampled=[wrong] * 3 + [right], before_greedy=[wrong], after_sampled=[right] * 4,
        after_greedy=[right], train=([wrong] * 3 + [right]) * 32,
    )  # fmt: skip
    figures = report.read_results(store, "agent", tmp_path, ABOUT, {"start": 1.25, "train": 2.0})
    report.show(figures)
    shown = capsys.readouterr().out
    assert "'positive' 75%, 'negative' 25%" in shown
    assert "held-out tasks by kind: negative 25% -> 100%" in shown
    assert "mail" not in shown
    report.write(figures, tmp_path)
    stored = json.loads((tmp_path / report.RESULT).read_text())
    assert (stored["dtype"], stored["versions_proven"]) == ("bfloat16", 0)
    assert (stored["seconds_total"], stored["curve"]) == (3.25, [[128, 0.25]])
    assert (tmp_path / report.CURVE).read_bytes().startswith(b"\x89PNG")


def test_the_tokens_of_rejected_rows_are_left_out_of_those_that_vllm_sampled(tmp_path: Path, store: Store) -> None:
    group = judged_group(store, ["a", "b", "c"], [0.0, 0.5, 1.0])  # two tokens each
    held = store.rounds.start("agent", 0)
    metrics = {
        "groups": 1, "trajectories": 3, "reward": 0.5, "loss": 0.1, "seconds": 1.0, "logprob_abs_diff_mean": 0.0,
        "logprob_abs_diff_max": 0.0, "untrained_tokens": {"greedy": 1}, "rows_rejected": 1, "tokens_compared": 5,
        "tokens_trained": 3, "approx_kl": 0.01,
    }  # fmt: skip
    store.rounds.commit(held.id, version=1, checkpoint="/c/1", groups=[group.id], metrics=metrics)
    once = [row(SEARCH)]
    written(tmp_path, before_sampled=once, before_greedy=once, after_sampled=once, after_greedy=once, train=[])
    found = report.read_results(store, "agent", tmp_path, ABOUT, {})
    assert found["tokens_left_out"] == {"greedy": 1, "rejected": 2}
    assert found["tokens_trained_from_engine"] == found["tokens_trained"] == 3
    (trained,) = found["rounds"]
    assert (trained["version"], trained["rows_rejected"], trained["proofs"]) == (1, 1, [])
    report.show(found)
