"""What counts as evidence where a conversation's path has changed, and what does not: claims on the memory itself."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ratchet.proxy.coordinator.linking.linker import TrajectoryLinker
from tests.proxy.test_linking import NEXT, USER, Message, answered, asked, tool_reply

LONG = "The budget of the spring meeting is 4,300, as the treasurer's second message says."
TASK = "Read all messages of the treasurer from March and list every sum of money in them."
SUMMARY = "So far: the treasurer's messages were read; two sums were found, 4,300 and 1,250."
ID = "chatcmpl-tool-0123456789abcdef0123456789abcdef"


@pytest.fixture
def linker() -> TrajectoryLinker:
    return TrajectoryLinker(idle_seconds=900)


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def said(text: str, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def tool(call_id: str, text: str = "done") -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


@pytest.mark.parametrize(
    ("given", "echoed"),
    [
        (said("hello \n"), said("hello")),
        (said("\n\nhello"), said("hello")),
        (said("<think>hm</think>\n\nhello"), said("hello")),
        (said("hello"), {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"},
                                                          {"type": "text", "text": "hello"}]}),
        (tool_reply('{"a": 1.0, "b": 2e3}'), tool_reply('{"a":1,"b":2000}')),
        (tool_reply(""), tool_reply("{}")),
    ],
)  # fmt: skip
def test_an_answer_is_known_again_however_it_is_trimmed(
    linker: TrajectoryLinker, given: Message, echoed: Message
) -> None:
    first = answered(linker, [USER], given)
    found = linker.find_link(asked([USER, echoed, NEXT]))
    assert (found.trajectory_id, found.linked_by.startswith("graph")) == (first.trajectory_id, True)


def test_a_reminder_that_is_gone_on_the_next_call_changes_nothing(linker: TrajectoryLinker) -> None:
    first = answered(linker, [USER, user("it is 12:00")], said("ok"))
    second = answered(linker, [USER, said("ok"), NEXT, user("it is 12:01")], said("yes"))
    assert second.trajectory_id == first.trajectory_id
    found = linker.find_link(asked([USER, said("ok"), NEXT, said("yes"), user("go on"), user("it is 12:02")]))
    assert (found.trajectory_id, found.linked_by) == (first.trajectory_id, "graph+gap")
    assert found.parent is not None
    assert found.parent.call_id.startswith("call_4")


def test_a_system_prompt_with_the_time_is_seen_through_by_what_we_answered(linker: TrajectoryLinker) -> None:
    run = answered(linker, [system("12:00"), USER], said(LONG))
    other = answered(linker, [system("12:00"), USER], said(LONG + " No."))
    for link, words in ((run, LONG), (other, LONG + " No.")):
        found = linker.find_link(asked([system("12:01"), USER, said(words), NEXT]))
        assert (found.trajectory_id, found.linked_by) == (link.trajectory_id, "answer")


def test_a_short_answer_is_no_evidence_by_itself_but_is_the_parent_once_the_run_is_known(
    linker: TrajectoryLinker,
) -> None:
    first = [system("12:00"), USER]
    run = answered(linker, first, said(LONG))
    answered(linker, [*first, said(LONG), NEXT], said("ok"))
    alone = linker.find_link(asked([system("12:01"), user("another"), said("ok"), NEXT]))
    assert alone.linked_by == "root"
    found = linker.find_link(asked([system("12:01"), USER, said(LONG), NEXT, said("ok"), NEXT]))
    assert (found.trajectory_id, found.parent and found.parent.call_id[:6]) == (run.trajectory_id, "call_4")


def test_answers_that_two_runs_gave_are_no_evidence_unless_their_whole_past_is_the_same(
    linker: TrajectoryLinker,
) -> None:
    answered(linker, [system("12:00"), USER], said(LONG))
    answered(linker, [system("12:01"), USER], said(LONG))
    assert linker.find_link(asked([system("12:02"), USER, said(LONG), NEXT])).linked_by == "root"
    same = {answered(linker, [USER], said(TASK)).trajectory_id for _ in range(2)}
    found = set()
    for _ in range(3):
        link = linker.find_link(asked([system("short now"), said(TASK), NEXT]))
        linker.begin_call(link, "agent", 0, 2.0)
        found.add(link.trajectory_id if link.linked_by == "answer" else link.linked_by)
    assert found == same | {"root"}


def test_one_id_of_ours_is_proof_and_an_id_that_anybody_may_give_is_none(linker: TrajectoryLinker) -> None:
    run = answered(linker, [USER], tool_reply("{}", ID))
    answered(linker, [user("other")], tool_reply("{}", "call_0"))
    kept = [system("the beginning was dropped"), tool_reply("{}", ID), tool(ID), NEXT]
    found = linker.find_link(asked(kept))
    assert (found.trajectory_id, found.linked_by) == (run.trajectory_id, "tool_ids")
    assert found.parent is not None
    assert (
        linker.find_link(asked([user("x"), tool_reply('{"other": 1}', "call_0"), tool("call_0")])).linked_by == "root"
    )


def test_a_later_answer_counts_though_a_turn_before_it_was_edited(linker: TrajectoryLinker) -> None:
    run = answered(linker, [USER], said("hello"))
    answered(linker, [USER, said("hello"), NEXT], said("ok"))
    found = linker.find_link(asked([USER, said("hello"), user("edited"), said("ok"), NEXT]))
    assert found.trajectory_id == run.trajectory_id
    assert found.parent is not None
    assert found.parent.call_id.startswith("call_3")


def test_tool_calls_that_were_turned_into_text_are_known_by_their_id(linker: TrajectoryLinker) -> None:
    run = answered(linker, [USER], tool_reply("{}", ID))
    text = f"Calling tools:\n[{{'id': '{ID}', 'type': 'function', 'function': {{'name': 'search'}}}}]"
    found = linker.find_link(asked([USER, said(text), user("Observation:\n3")]))
    assert (found.trajectory_id, found.linked_by, bool(found.parent)) == (run.trajectory_id, "tool_ids", True)


def test_an_answer_with_an_end_put_on_is_known_by_all_that_stands_before_it(linker: TrajectoryLinker) -> None:
    runs = [answered(linker, [user(f"task {number}")], said(LONG)) for number in range(2)]
    for number, run in enumerate(runs):
        found = linker.find_link(asked([user(f"task {number}"), said(LONG + "</code>"), NEXT]))
        assert (found.trajectory_id, found.linked_by, bool(found.parent)) == (run.trajectory_id, "quote", True)


def test_the_same_words_after_another_task_are_not_our_answer(linker: TrajectoryLinker) -> None:
    answered(linker, [user("task")], said(LONG))
    assert linker.find_link(asked([user("another task"), said(LONG + "</code>"), NEXT])).linked_by == "root"


@pytest.mark.parametrize(
    "prompt",
    [
        f"Here is the summary of what was done:\n{SUMMARY}\n\nGo on.",
        f"<summary>{SUMMARY}</summary>",
        f"Continue. Summary: {SUMMARY}",
        json.dumps([{"role": "assistant", "content": SUMMARY}]),
    ],
)
def test_a_prompt_that_quotes_our_answer_begins_a_segment_of_its_run(linker: TrajectoryLinker, prompt: str) -> None:
    run = answered(linker, [USER], said(SUMMARY))
    answered(linker, [user("other")], said(LONG))
    found = linker.find_link(asked([system("s"), user(prompt)]))
    assert (found.trajectory_id, found.linked_by, found.parent) == (run.trajectory_id, "quote", None)


def test_an_answer_with_line_breaks_is_known_inside_a_json_string(linker: TrajectoryLinker) -> None:
    words = f'{LONG}\n\n"{TASK}"\n- and no more'
    run = answered(linker, [USER], said(words))
    found = linker.find_link(asked([user("Rate: " + json.dumps({"said": words, "by": "agent"}))]))
    assert (found.trajectory_id, found.linked_by) == (run.trajectory_id, "quote")


def test_a_prompt_that_quotes_two_runs_belongs_to_none(linker: TrajectoryLinker) -> None:
    answered(linker, [USER], said(LONG))
    answered(linker, [USER], said(SUMMARY))
    assert linker.find_link(asked([user(f"Which is better?\n{LONG}\n{SUMMARY}")])).linked_by == "root"


def test_a_sub_agent_is_found_by_its_task_only_while_the_parents_call_waits(linker: TrajectoryLinker) -> None:
    call = tool_reply(json.dumps({"task": TASK}), ID)
    run = answered(linker, [USER], call)
    sub = linker.find_link(asked([system("You are a reader."), user(TASK)]))
    assert (sub.trajectory_id, sub.linked_by) == (run.trajectory_id, "quote")
    linker.begin_call(linker.find_link(asked([USER, call, tool(ID)])), "agent", 0, 2.0)
    assert linker.find_link(asked([system("You are a reader."), user(TASK)])).linked_by == "root"


def test_words_of_the_task_itself_are_no_evidence(linker: TrajectoryLinker) -> None:
    """Another attempt at the same task, begun later, holds the same words."""
    answered(linker, [system("12:00"), user(TASK)], tool_reply(json.dumps({"q": TASK}), ID))
    assert linker.find_link(asked([system("12:01"), user(TASK)])).linked_by == "root"


def test_no_evidence_reaches_into_another_keys_runs(linker: TrajectoryLinker) -> None:
    call = tool_reply(json.dumps({"task": TASK}), ID)
    answered(linker, [USER], call, key="mine")
    answered(linker, [USER], said(SUMMARY), key="mine")
    for messages in ([USER, call, tool(ID)], [user(TASK)], [user(SUMMARY)], [user("x"), call], [user(f"id: {ID}")]):
        assert linker.find_link(asked(messages, key="other")).linked_by == "root"
        assert linker.find_link(asked(messages, key="mine")).linked_by != "root"


def test_a_run_that_is_forgotten_leaves_nothing_behind(linker: TrajectoryLinker) -> None:
    link = answered(linker, [USER], tool_reply(json.dumps({"task": TASK}), ID))
    linker.forget_trajectory(link.trajectory_id)
    assert not linker._leaves
