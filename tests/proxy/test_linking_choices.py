"""Which of several equal answers, and which of several equal names, a call continues."""

from __future__ import annotations

from hashlib import blake2b

import pytest

from ratchet.proxy.coordinator.linking.linker import TrajectoryLinker
from ratchet.proxy.coordinator.linking.open_trajectories import candidate_names
from ratchet.proxy.messages.link_records import Leaf
from ratchet.proxy.messages.text_fingerprints import short_key
from ratchet.store.content import messages as canon
from tests.proxy.test_linking import NEXT, REPLY, USER, evidence


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
