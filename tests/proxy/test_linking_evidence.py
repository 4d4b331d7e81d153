"""Which evidence links a call after its conversation's history has changed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ratchet.proxy.coordinator.linking.linker import TrajectoryLinker
from tests.proxy.test_linking import NEXT, USER, Message, answered, evidence, tool_reply

LONG = "The budget of the spring meeting is 4,300, as the treasurer's second message says."
TASK = "Read all messages of the treasurer from March and list every sum of money in them."
SUMMARY = "So far: the treasurer's messages were read; two sums were found, 4,300 and 1,250."
ID = "chatcmpl-tool-0123456789abcdef0123456789abcdef"
OTHER_ID = "chatcmpl-tool-fedcba9876543210fedcba9876543210"


@pytest.fixture
def linker() -> TrajectoryLinker:
    return TrajectoryLinker(idle_seconds=900)


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def tool(call_id: str, text: str = "done") -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


@pytest.mark.parametrize(
    ("given", "echoed"),
    [
        (assistant("hello \n"), assistant("hello")),
        (assistant("\n\nhello"), assistant("hello")),
        (assistant("<think>hm</think>\n\nhello"), assistant("hello")),
        (assistant("hello"), {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"},
                                                          {"type": "text", "text": "hello"}]}),
        (tool_reply('{"a": 1.0, "b": 2e3}'), tool_reply('{"a":1,"b":2000}')),
        (tool_reply(""), tool_reply("{}")),
    ],
)  # fmt: skip
def test_an_answer_is_recognized_however_it_is_trimmed(
    linker: TrajectoryLinker, given: Message, echoed: Message
) -> None:
    first = answered(linker, [USER], given)
    found = linker.find_link(evidence([USER, echoed, NEXT]))
    assert (found.trajectory_id, found.linked_by.startswith("graph")) == (first.trajectory_id, True)


def test_a_reminder_that_is_missing_in_the_next_call_changes_nothing(linker: TrajectoryLinker) -> None:
    first = answered(linker, [USER, user("it is 12:00")], assistant("ok"))
    second = answered(linker, [USER, assistant("ok"), NEXT, user("it is 12:01")], assistant("yes"))
    assert second.trajectory_id == first.trajectory_id
    found = linker.find_link(
        evidence([USER, assistant("ok"), NEXT, assistant("yes"), user("go on"), user("it is 12:02")])
    )
    assert (found.trajectory_id, found.linked_by) == (first.trajectory_id, "graph+gap")
    assert found.parent is not None
    assert found.parent.call_id.startswith("call_4")


def test_a_missing_last_message_proves_nothing_if_the_tool_call_has_another_random_id(linker: TrajectoryLinker) -> None:
    """Other conversations made the same tool call; that of this id is not known, for example after an outage."""
    first = answered(linker, [USER, user("it is 12:00")], tool_reply("{}", ID))
    own = linker.find_link(evidence([USER, tool_reply("{}", ID), tool(ID)]))
    assert (own.trajectory_id, own.linked_by) == (first.trajectory_id, "graph+gap")
    other = linker.find_link(evidence([USER, tool_reply("{}", OTHER_ID), tool(OTHER_ID)]))
    assert (other.parent, other.linked_by) == (None, "root")
    renumbered = linker.find_link(evidence([USER, tool_reply("{}", "call_0"), tool("call_0")]))
    assert renumbered.trajectory_id == first.trajectory_id


def test_a_system_prompt_with_the_time_is_linked_by_our_answers(linker: TrajectoryLinker) -> None:
    run = answered(linker, [system("12:00"), USER], assistant(LONG))
    other = answered(linker, [system("12:00"), USER], assistant(LONG + " No."))
    for link, words in ((run, LONG), (other, LONG + " No.")):
        found = linker.find_link(evidence([system("12:01"), USER, assistant(words), NEXT]))
        assert (found.trajectory_id, found.linked_by) == (link.trajectory_id, "answer")


def test_a_short_answer_is_no_evidence_but_becomes_the_parent_once_the_run_is_known(
    linker: TrajectoryLinker,
) -> None:
    first = [system("12:00"), USER]
    run = answered(linker, first, assistant(LONG))
    answered(linker, [*first, assistant(LONG), NEXT], assistant("ok"))
    alone = linker.find_link(evidence([system("12:01"), user("another"), assistant("ok"), NEXT]))
    assert alone.linked_by == "root"
    found = linker.find_link(evidence([system("12:01"), USER, assistant(LONG), NEXT, assistant("ok"), NEXT]))
    assert (found.trajectory_id, found.parent and found.parent.call_id[:6]) == (run.trajectory_id, "call_4")


def test_answers_that_two_runs_gave_are_no_evidence_unless_their_whole_past_is_the_same(
    linker: TrajectoryLinker,
) -> None:
    answered(linker, [system("12:00"), USER], assistant(LONG))
    answered(linker, [system("12:01"), USER], assistant(LONG))
    assert linker.find_link(evidence([system("12:02"), USER, assistant(LONG), NEXT])).linked_by == "root"
    same = {answered(linker, [USER], assistant(TASK)).trajectory_id for _ in range(2)}
    found = set()
    for _ in range(3):
        link = linker.find_link(evidence([system("short now"), assistant(TASK), NEXT]))
        linker.begin_call(link, "agent", 0, 2.0)
        found.add(link.trajectory_id if link.linked_by == "answer" else link.linked_by)
    assert found == same | {"root"}


def test_a_generated_id_is_proof_and_a_common_id_is_none(linker: TrajectoryLinker) -> None:
    run = answered(linker, [USER], tool_reply("{}", ID))
    answered(linker, [user("other")], tool_reply("{}", "call_0"))
    kept = [system("the beginning was dropped"), tool_reply("{}", ID), tool(ID), NEXT]
    found = linker.find_link(evidence(kept))
    assert (found.trajectory_id, found.linked_by) == (run.trajectory_id, "tool_ids")
    assert found.parent is not None
    assert (
        linker.find_link(evidence([user("x"), tool_reply('{"other": 1}', "call_0"), tool("call_0")])).linked_by
        == "root"
    )


def test_a_later_answer_counts_although_an_earlier_turn_was_edited(linker: TrajectoryLinker) -> None:
    run = answered(linker, [USER], assistant("hello"))
    answered(linker, [USER, assistant("hello"), NEXT], assistant("ok"))
    found = linker.find_link(evidence([USER, assistant("hello"), user("edited"), assistant("ok"), NEXT]))
    assert found.trajectory_id == run.trajectory_id
    assert found.parent is not None
    assert found.parent.call_id.startswith("call_3")


def test_tool_calls_turned_into_text_are_recognized_by_their_id(linker: TrajectoryLinker) -> None:
    run = answered(linker, [USER], tool_reply("{}", ID))
    text = f"Calling tools:\n[{{'id': '{ID}', 'type': 'function', 'function': {{'name': 'search'}}}}]"
    found = linker.find_link(evidence([USER, assistant(text), user("Observation:\n3")]))
    assert (found.trajectory_id, found.linked_by, bool(found.parent)) == (run.trajectory_id, "tool_ids", True)


def test_an_answer_with_an_appended_end_is_recognized_by_its_beginning(linker: TrajectoryLinker) -> None:
    runs = [answered(linker, [user(f"task {number}")], assistant(LONG)) for number in range(2)]
    for number, run in enumerate(runs):
        found = linker.find_link(evidence([user(f"task {number}"), assistant(LONG + "</code>"), NEXT]))
        assert (found.trajectory_id, found.linked_by, bool(found.parent)) == (run.trajectory_id, "quote", True)


def test_the_same_words_after_another_task_are_not_linked(linker: TrajectoryLinker) -> None:
    answered(linker, [user("task")], assistant(LONG))
    assert linker.find_link(evidence([user("another task"), assistant(LONG + "</code>"), NEXT])).linked_by == "root"


@pytest.mark.parametrize(
    "prompt",
    [
        f"Here is the summary of what was done:\n{SUMMARY}\n\nGo on.",
        f"<summary>{SUMMARY}</summary>",
        f"Continue. Summary: {SUMMARY}",
        json.dumps([{"role": "assistant", "content": SUMMARY}]),
    ],
)
def test_a_prompt_that_quotes_our_answer_starts_a_segment_of_its_run(linker: TrajectoryLinker, prompt: str) -> None:
    run = answered(linker, [USER], assistant(SUMMARY))
    answered(linker, [user("other")], assistant(LONG))
    found = linker.find_link(evidence([system("s"), user(prompt)]))
    assert (found.trajectory_id, found.linked_by, found.parent) == (run.trajectory_id, "quote", None)


def test_an_answer_with_line_breaks_is_recognized_inside_a_json_string(linker: TrajectoryLinker) -> None:
    words = f'{LONG}\n\n"{TASK}"\n- and no more'
    run = answered(linker, [USER], assistant(words))
    found = linker.find_link(evidence([user("Rate: " + json.dumps({"answer": words, "by": "agent"}))]))
    assert (found.trajectory_id, found.linked_by) == (run.trajectory_id, "quote")


def test_a_prompt_that_quotes_two_runs_belongs_to_none(linker: TrajectoryLinker) -> None:
    answered(linker, [USER], assistant(LONG))
    answered(linker, [USER], assistant(SUMMARY))
    assert linker.find_link(evidence([user(f"Which is better?\n{LONG}\n{SUMMARY}")])).linked_by == "root"


def test_a_sub_agent_is_found_by_its_task_only_while_the_parents_call_waits(linker: TrajectoryLinker) -> None:
    call = tool_reply(json.dumps({"task": TASK}), ID)
    run = answered(linker, [USER], call)
    sub = linker.find_link(evidence([system("You are a reader."), user(TASK)]))
    assert (sub.trajectory_id, sub.linked_by) == (run.trajectory_id, "quote")
    linker.begin_call(linker.find_link(evidence([USER, call, tool(ID)])), "agent", 0, 2.0)
    assert linker.find_link(evidence([system("You are a reader."), user(TASK)])).linked_by == "root"


def test_arguments_are_forgotten_with_the_result_and_what_the_answer_says_is_not(linker: TrajectoryLinker) -> None:
    call = tool_reply(json.dumps({"task": TASK, "again": LONG}), ID) | {"content": LONG}
    run = answered(linker, [USER], call)
    waiting = linker.bytes
    linker.begin_call(linker.find_link(evidence([USER, call, tool(ID)])), "agent", 0, 2.0)
    assert linker.bytes < waiting - 300
    assert linker.find_link(evidence([user(TASK)])).linked_by == "root"
    quoting = linker.find_link(evidence([user(LONG)]))
    assert (quoting.trajectory_id, quoting.linked_by) == (run.trajectory_id, "quote")
    linker.forget_trajectory(run.trajectory_id)
    assert linker.bytes == 0
    assert not linker._leaves


def test_words_of_the_task_itself_are_no_evidence(linker: TrajectoryLinker) -> None:
    """Another attempt at the same task, started later, contains the same words."""
    answered(linker, [system("12:00"), user(TASK)], tool_reply(json.dumps({"q": TASK}), ID))
    assert linker.find_link(evidence([system("12:01"), user(TASK)])).linked_by == "root"


def test_evidence_never_links_to_runs_of_another_key(linker: TrajectoryLinker) -> None:
    call = tool_reply(json.dumps({"task": TASK}), ID)
    answered(linker, [USER], call, key="mine")
    answered(linker, [USER], assistant(SUMMARY), key="mine")
    for messages in ([USER, call, tool(ID)], [user(TASK)], [user(SUMMARY)], [user("x"), call], [user(f"id: {ID}")]):
        assert linker.find_link(evidence(messages, key="other")).linked_by == "root"
        assert linker.find_link(evidence(messages, key="mine")).linked_by != "root"


def test_a_forgotten_run_leaves_nothing_behind(linker: TrajectoryLinker) -> None:
    link = answered(linker, [USER], tool_reply(json.dumps({"task": TASK}), ID))
    linker.forget_trajectory(link.trajectory_id)
    assert not linker._leaves
