"""Which of several equal or stopped answers, and which of several equal names, a call continues."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import pytest
from msgspec import structs

from ratchet.proxy.coordinator.linking.linker import MessagesNeeded, TrajectoryLinker
from ratchet.proxy.coordinator.linking.open_trajectories import candidate_names
from ratchet.proxy.messages.coordinator_messages import Batch, End, decode_request, encode
from ratchet.proxy.messages.link_records import Leaf, Link, StoppedText
from ratchet.proxy.messages.text_fingerprints import short_key
from ratchet.store.content import messages as canon
from tests.proxy.test_linking import NEXT, REPLY, USER, Message, answered, evidence, tool_reply

STOPPED = "A longer answer that the user stopped"


@pytest.fixture
def linker() -> TrajectoryLinker:
    return TrajectoryLinker(idle_seconds=900)


def choices_of(linker: TrajectoryLinker, texts: list[str], now: float) -> str:
    """Link a first call with these answers; return its trajectory."""
    link = linker.find_link(evidence([USER]))
    linker.begin_call(link, "agent", 0, now)
    before = canon.link_keys([USER])[0]
    keys = [short_key(canon.link_key(before, {**REPLY, "content": text})) for text in texts]
    leaves = [
        Leaf.of(link.trajectory_id, f"call_{now}", place, 0, key, (), "k", b"", now) for place, key in enumerate(keys)
    ]  # fmt: skip
    linker.end_call(link, leaves, now)
    return link.trajectory_id


@pytest.mark.parametrize("texts", [["hello"] * 4, ["bye", "hello", "hello", "well"]])
def test_of_several_answers_one_is_taken_from_each_run_before_a_second_from_any(
    linker: TrajectoryLinker, texts: list[str]
) -> None:
    runs = {choices_of(linker, texts, float(now)) for now in range(3)}
    reply = {**REPLY, "content": "hello"}
    continued = []
    for _ in range(4):
        found = linker.find_link(evidence([USER, reply, NEXT]))
        assert found.parent is not None
        linker.begin_call(found, "agent", 0, 9.0)
        continued.append((found.trajectory_id, found.parent.choice))
    assert {name for name, _ in continued[:3]} == runs
    first = texts.index("hello")
    assert [choice for _, choice in continued] == [first] * 3 + [first + 1]


def test_a_run_with_a_continued_answer_comes_after_one_without(linker: TrajectoryLinker) -> None:
    free = choices_of(linker, ["hello", "bye"], 1.0)
    taken = choices_of(linker, ["hello", "bye"], 2.0)
    found = linker.find_link(evidence([USER, {**REPLY, "content": "bye"}, NEXT]))
    assert found.trajectory_id == taken
    linker.begin_call(found, "agent", 0, 9.0)
    assert linker.find_link(evidence([USER, {**REPLY, "content": "hello"}, NEXT])).trajectory_id == free


def stop(linker: TrajectoryLinker, prompt: list[Message], text: str = STOPPED, now: float = 1.0) -> Link:
    """Link a call whose client stops its answer, of which the proxy has this text, as a worker reports it."""
    link = linker.find_link(evidence(prompt))
    linker.begin_call(link, "agent", 0, now)
    before = canon.link_keys(prompt)[-1]
    key = short_key(canon.link_key(before, {**REPLY, "content": text}))
    stopped = StoppedText.of(short_key(before), text)
    leaf = Leaf.of(link.trajectory_id, f"call_{now}", 0, 0, key, (), "k", b"", now, stopped=stopped)
    sent = decode_request(encode(Batch("w", "s", "b", 1, 0.0, (End(1, (leaf,), now, True),))))
    assert isinstance(sent, Batch)
    assert isinstance(sent.messages[0], End)
    linker.end_call(link, sent.messages[0].leaves, now)
    return link


def assistant(text: str, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


@pytest.mark.parametrize("earlier", [[], [REPLY, NEXT]], ids=["first", "later"])
@pytest.mark.parametrize("text", ["A", "A longer answer", "A longer answer \n", STOPPED])
def test_the_beginning_of_a_stopped_answer_continues_it(
    linker: TrajectoryLinker, earlier: list[Message], text: str
) -> None:
    if earlier:
        answered(linker, [USER], REPLY, now=0.5)
    own = stop(linker, [USER, *earlier])
    found = linker.find_link(evidence([USER, *earlier, assistant(text), NEXT]))
    assert (found.trajectory_id, found.linked_by) == (own.trajectory_id, "graph")
    assert found.parent is not None
    assert found.parent.call_id == "call_1.0"


@pytest.mark.parametrize(
    "messages",
    [
        [USER, assistant(""), NEXT],
        [USER, assistant("<think>hm</think>"), NEXT],
        [USER, assistant("A shorter answer"), NEXT],
        [USER, assistant(STOPPED + " and more"), NEXT],
        [USER, assistant("A longer answer", tool_calls=tool_reply("{}")["tool_calls"]), NEXT],
        [{**USER, "content": "hi!"}, assistant("A longer answer"), NEXT],
        [USER, NEXT, assistant("A longer answer"), NEXT],
        [assistant("A longer answer"), NEXT],
    ],
)
def test_other_messages_continue_no_stopped_answer(linker: TrajectoryLinker, messages: list[Message]) -> None:
    stop(linker, [USER])
    assert linker.find_link(evidence(messages)).linked_by == "root"


def test_the_beginning_of_an_answer_that_was_not_stopped_or_is_another_keys_continues_nothing(
    linker: TrajectoryLinker,
) -> None:
    answered(linker, [USER], assistant(STOPPED))
    assert linker.find_link(evidence([USER, assistant("A longer answer"), NEXT])).linked_by == "root"
    stop(linker, [USER])
    assert linker.find_link(evidence([USER, assistant("A longer answer"), NEXT], key="other")).linked_by == "root"
    named = linker.find_link(evidence([USER, assistant("A longer"), NEXT], explicit="mine", explicit_by="header"))
    assert named.parent is None


def test_of_several_stopped_answers_the_latest_that_is_not_continued_is_chosen(linker: TrajectoryLinker) -> None:
    other = stop(linker, [USER], "Another answer", now=9.0)
    runs = [stop(linker, [USER], STOPPED + "." * place, now=float(place)).trajectory_id for place in range(3)]
    continued = []
    for _ in range(4):
        found = linker.find_link(evidence([USER, assistant("A longer answer"), NEXT]))
        linker.begin_call(found, "agent", 0, 9.0)
        continued.append(found.trajectory_id)
    assert continued == [runs[2], runs[1], runs[0], runs[2]]
    assert other.trajectory_id not in runs


def test_an_equal_answer_comes_before_a_stopped_one(linker: TrajectoryLinker) -> None:
    equal = answered(linker, [USER], assistant("A longer answer"), now=1.0)
    stop(linker, [USER], now=2.0)
    assert linker.find_link(evidence([USER, assistant("A longer answer"), NEXT])).trajectory_id == equal.trajectory_id


def test_the_last_message_alone_does_not_show_that_it_begins_a_stopped_answer(linker: TrajectoryLinker) -> None:
    stop(linker, [USER])
    whole = evidence([USER, assistant("A longer answer"), NEXT])
    last = structs.replace(whole, messages=[{"role": "assistant"}], keys=whole.keys[1:2], is_partial=True)
    with pytest.raises(MessagesNeeded):
        linker.find_link(last)


def test_stopped_texts_count_as_memory_and_are_forgotten_with_their_trajectory(linker: TrajectoryLinker) -> None:
    text = "x" * 2**16
    long = stop(linker, [USER], text)
    assert linker.bytes > 2**16
    beginning = evidence([USER, assistant("xxx"), NEXT])
    assert linker.find_link(beginning).trajectory_id == long.trajectory_id
    linker.forget_trajectory(long.trajectory_id)
    assert (linker.bytes, linker.find_link(beginning).linked_by) == (0, "root")
    longer = stop(linker, [USER], text + "x")  # too long to be kept
    assert linker.bytes < 2**16
    assert linker.find_link(beginning).linked_by == "root"
    assert linker.find_link(evidence([USER, assistant(text + "x"), NEXT])).trajectory_id == longer.trajectory_id


def test_a_name_chosen_by_another_key_sets_neither_version_nor_purpose(
    linker: TrajectoryLinker,
) -> None:
    mine = blake2b(b"victim\0agent", digest_size=4).hexdigest()
    for name in ("job", f"job~{mine}"):
        taken = linker.find_link(evidence([USER], "attacker", explicit=name, explicit_by="header", version=3))
        linker.begin_call(taken, "agent", 3, 1.0)
        assert (taken.trajectory_id, taken.purpose) == (name, "eval")
    found = linker.find_link(evidence([USER], "victim", explicit="job", explicit_by="header"))
    assert (found.version, found.purpose, found.key_id) == (None, "live", "victim")
    linker.begin_call(found, "agent", 1, 1.0)
    again = linker.find_link(evidence([USER], "victim", explicit="job", explicit_by="header"))
    assert (again.trajectory_id, again.version) == (found.trajectory_id, 1)
    assert len(found.trajectory_id) <= 128
    assert len(list(candidate_names("x" * 128, "victim", "agent"))[2]) <= 128
