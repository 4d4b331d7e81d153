"""The mailbox, its tasks, and the judge that finds the right answer by the question."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from examples.email_search.demonstrations import MIXED, EpisodeMailbox, draw
from examples.email_search.hard_set import FORWARD, TWO_HOPS, make_hard_set
from ratchet.demo.email_search.agent import TOOLS, call_tool, opening
from ratchet.demo.email_search.mailbox import ENTITIES, Mail, Mailbox, synthetic_mails
from ratchet.demo.email_search.tasks import (
    TEST_PAIRS,
    TRAIN_PAIRS,
    VALIDATION_PAIRS,
    MailTask,
    UnknownQuestionError,
    every_task,
    judge,
    matches,
    read_tasks,
    write_tasks,
)
from tests.harness.chat_models import tool_call


def test_a_search_finds_the_mail_and_reading_it_gives_the_answer(box: Mailbox, task: MailTask) -> None:
    hits = json.loads(call_tool(box, "search_inbox", json.dumps({"keywords": [task.person, task.topic]})).content)
    assert [hit["message_id"] for hit in hits] == [task.message_id]
    assert task.answer in call_tool(box, "read_email", json.dumps({"message_id": task.message_id})).content


def test_the_final_answer_is_given_back(box: Mailbox) -> None:
    result = call_tool(box, "return_final_answer", '{"answer": "Oslo"}')
    assert (result.answer, result.failure) == ("Oslo", None)


@pytest.mark.parametrize(
    ("name", "arguments", "failure"),
    [
        ("search_inbox", '{"keywords": ["bud', "malformed_json"),
        ("search_mail", "{}", "unknown_tool"),
        ("search_inbox", '{"keywords": ["budget"], "max_results": 5}', "unexpected_argument"),
        ("read_email", "{}", "missing_argument"),
        ("search_inbox", '{"keywords": "budget"}', "wrong_type"),
        ("search_inbox", '{"keywords": []}', "wrong_type"),
        ("read_email", '{"message_id": 7}', "wrong_type"),
        ("read_email", "[1]", "wrong_type"),
        ("search_inbox", '{"keywords": ["budget", "email"]}', "no_hits"),
        ("read_email", '{"message_id": "oslo-paris"}', "no_such_message"),
    ],
)
def test_each_wrong_call_has_its_class_and_never_raises(box: Mailbox, name: str, arguments: str, failure: str) -> None:
    result = call_tool(box, name, arguments)
    assert result.failure == failure
    assert result.answer is None


@pytest.mark.parametrize("keyword", ['"', "a OR b", "NEAR(", "*", "", "body:x", "\x00", "\ud800"])
def test_no_keyword_is_taken_for_search_syntax(box: Mailbox, keyword: str) -> None:
    assert call_tool(box, "search_inbox", json.dumps({"keywords": [keyword]})).failure == "no_hits"


def test_a_thousand_keywords_are_only_no_hit(box: Mailbox) -> None:
    assert call_tool(box, "search_inbox", json.dumps({"keywords": ["budget"] * 999 + ["x"]})).failure == "no_hits"


def test_a_failed_build_leaves_the_old_mailbox(tmp_path: Path) -> None:
    path, mail = tmp_path / "box.sqlite", Mail("a", "x@example.com", "s", "b", "2026-01-01")
    Mailbox.build(path, [mail]).close()
    with pytest.raises(Exception, match="UNIQUE"):
        Mailbox.build(path, [mail, mail])
    box = Mailbox(path)
    assert len(box) == 1
    box.close()


def test_schemas_name_every_argument_as_required() -> None:
    for tool in TOOLS:
        parameters = tool["function"]["parameters"]
        assert parameters["required"] == list(parameters["properties"])


def test_mails_follow_from_the_seed() -> None:
    assert synthetic_mails(3) == synthetic_mails(3) != synthetic_mails(4)


def test_splits_are_large_and_share_no_pair_question_or_mail(home: Path) -> None:
    splits = {"train": TRAIN_PAIRS, "validation": VALIDATION_PAIRS, "test": TEST_PAIRS}
    tasks = {split: read_tasks(home, split) for split in splits}
    assert [len(found) for found in tasks.values()] == [400, 50, 150]
    for field in ("id", "question", "message_id"):
        values = [getattr(task, field) for found in tasks.values() for task in found]
        assert len(set(values)) == len(values)
    for split, pairs in splits.items():
        assert {(task.person, task.topic) for task in tasks[split]} == set(pairs)


def test_every_hard_task_has_a_question_of_its_own_and_is_solvable_in_its_mailbox(home: Path) -> None:
    known = {task.question for split in ("train", "validation", "test") for task in read_tasks(home, split)}
    mails, hard = make_hard_set(42, known)
    box = Mailbox.build(":memory:", mails)
    assert len({task.question for task in hard} - known) == len(hard) == 100
    assert len(every_task(home)) == 600
    for task in hard:
        person, body = task.person, FORWARD
        for _ in range(2 if task.id.startswith(TWO_HOPS) else 1):
            assert task.answer not in body
            first, *_ = box.search([person, task.topic])
            body = str(box.read(first[0]))
            person = body.split()[0]
        assert (first[0], task.answer in body) == (task.message_id, True)
    box.close()


def test_a_new_task_set_leaves_no_split_of_the_old_one(tmp_path: Path, task: MailTask) -> None:
    write_tasks(tmp_path, {"train": [task], "validation": [task]})
    write_tasks(tmp_path, {"test": [task]})
    assert [path.name for path in tmp_path.iterdir()] == ["test.jsonl"]
    assert every_task(tmp_path) == [task]


def test_no_demonstration_is_about_a_held_out_pair() -> None:
    rng, stages = random.Random(0), [EpisodeMailbox.made(1), EpisodeMailbox.made(2)]
    for _ in range(500):
        question = draw(stages, rng, MIXED)[1]["content"]
        words = {word for word in question.replace("?", "").split() if word in ENTITIES}
        assert any(words == set(pair) for pair in TRAIN_PAIRS)


def test_a_broken_task_file_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"question": "q", "answer": "a"}\n{"question": "q"}\n', "utf-8")
    with pytest.raises(ValueError, match=r"train\.jsonl:2 "):
        read_tasks(tmp_path, "train")


@pytest.mark.parametrize(
    ("given", "right", "expected"),
    [
        ("Oslo", "Oslo", True),
        (" oslo. ", "Oslo", True),
        ("It is in Oslo.", "Oslo", True),
        ("Osloer", "Oslo", False),
        ("not Oslo", "Oslo", False),
        ("Oslo or Paris", "Oslo", False),
        ("Oslo, Paris", "Oslo", False),
        ("", "Oslo", False),
        (None, "Oslo", False),
        ("May", "May", True),
    ],
)
def test_an_answer_counts_between_word_borders_and_alone(given: str | None, right: str, expected: bool) -> None:
    assert matches(given, right, {"Oslo", "Paris", "May"}) is expected


@pytest.fixture(autouse=True)
def _home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMAIL_SEARCH_HOME", str(home))


def trajectory(task: MailTask, *messages: dict[str, Any]) -> dict[str, Any]:
    return {"id": "t1", "messages": [*opening(task.question), *messages], "tools": [], "task": None}


def answer(text: str) -> dict[str, Any]:
    return tool_call("return_final_answer", json.dumps({"answer": text}))


def test_the_right_answer_scores_one_and_says_what_was_done(task: MailTask) -> None:
    verdict = judge(trajectory(task, tool_call("search_inbox", '{"keywords": ["a"]}'), answer(task.answer)))
    assert verdict["score"] == 1.0
    assert verdict["components"] == {"answered": 1.0, "correct": 1.0, "searched": 1.0, "read": 0.0}
    assert task.answer in verdict["explanation"]


def test_a_wrong_answer_a_text_and_silence_score_nothing(task: MailTask) -> None:
    text_answer = {"role": "assistant", "content": f"It is {task.answer}."}
    for messages in ([answer("Atlantis")], [text_answer], []):
        assert judge(trajectory(task, *messages))["score"] == 0.0


def test_naming_every_city_and_month_scores_nothing(home: Path, task: MailTask) -> None:
    everything = " ".join(sorted({other.answer for other in read_tasks(home, "train")}))
    assert judge(trajectory(task, answer(everything)))["score"] == 0.0


def test_an_answer_outside_the_schema_does_not_count(task: MailTask) -> None:
    extra = tool_call("return_final_answer", json.dumps({"answer": task.answer, "sure": True}))
    assert judge(trajectory(task, extra))["score"] == 0.0


def test_the_first_answer_counts_not_the_last(task: MailTask) -> None:
    assert judge(trajectory(task, answer("Atlantis"), answer(task.answer)))["score"] == 0.0


def test_content_in_parts_and_parsed_arguments_are_understood(task: MailTask) -> None:
    call = {"type": "function", "function": {"name": "return_final_answer", "arguments": {"answer": task.answer}}}
    user = {"role": "user", "content": [{"type": "text", "text": task.question}]}
    messages = [user, {"role": "assistant", "tool_calls": [call]}]
    assert judge({"id": "t", "messages": messages, "tools": [], "task": None})["score"] == 1.0


def test_an_unknown_question_is_an_error_that_names_the_remedy() -> None:
    with pytest.raises(UnknownQuestionError, match="EMAIL_SEARCH_HOME"):
        judge({"id": "t", "messages": opening("Who am I?"), "tools": [], "task": None})


def test_a_missing_task_set_is_an_error_that_names_the_remedy(
    tmp_path: Path, task: MailTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMAIL_SEARCH_HOME", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="build-db"):
        judge(trajectory(task))


def test_a_rebuilt_task_set_is_read_again(tmp_path: Path, task: MailTask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMAIL_SEARCH_HOME", str(tmp_path))
    for number, right in enumerate(("Oslo", "Reykjavik")):
        for name in ("train.jsonl", "test.jsonl"):
            row = json.dumps({"question": task.question, "answer": right}) + "\n"
            (tmp_path / name).write_text(row, "utf-8")
            os.utime(tmp_path / name, ns=(number + 1, number + 1))
        assert judge(trajectory(task, answer("Oslo")))["score"] == float(right == "Oslo")
