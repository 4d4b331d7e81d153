"""Linking restored from the store, all of it or a part, without holding the event loop."""

from __future__ import annotations

import asyncio
import itertools
import time
from unittest.mock import Mock

import msgspec
import pytest
import sqlalchemy as sa

from ratchet.proxy.coordinator.linking.cautious_linker import CautiousLinker, Doubt
from ratchet.proxy.coordinator.linking.restore import LinkingRestore
from ratchet.store.calls.resume_state import Answers
from ratchet.store.content.messages import answer_keys, link_keys
from ratchet.store.errors import StoreUnavailable
from ratchet.store.records import UNLINKED, OpenLeaf, UnansweredCall
from ratchet.store.store import Store
from tests.harness import records
from tests.proxy.test_linking import ATTEMPT, evidence

REPLY = {"role": "assistant", "content": "Oslo"}
NEXT = {"role": "user", "content": "And then?"}
_TRAJECTORIES = 1_000


@pytest.fixture
def linker() -> CautiousLinker:
    """The linker of a proxy of one process."""
    linker = CautiousLinker(900, 2**24, 2**24)
    linker.doubt = lambda: Doubt.NONE
    return linker


@pytest.fixture
def filled(store: Store) -> Store:
    """A store with open trajectories."""
    starts = [records.call_start(f"call_{n:04}", f"traj_{n:04}", at=time.time() - 1) for n in range(_TRAJECTORIES)]
    store.calls.ship([records.ended(start, REPLY) for start in starts])
    return store


async def test_the_event_loop_does_its_other_work_while_many_trajectories_are_restored(
    filled: Store, linker: CautiousLinker
) -> None:
    sizes: list[int] = []

    async def look() -> None:
        while len(linker) < _TRAJECTORIES:
            sizes.append(len(linker))
            await asyncio.sleep(0)

    looking = asyncio.create_task(look())
    assert await LinkingRestore(linker, filled, 900).restore()
    await looking
    found = [*sorted(set(sizes)), _TRAJECTORIES]
    assert max(after - before for before, after in itertools.pairwise(found)) <= _TRAJECTORIES // 3
    prompt = [*records.QUESTION, REPLY, {"role": "user", "content": "And then?"}]
    assert linker.find_link(evidence(prompt, key_id=None)).linked_by == "graph"


async def test_what_is_deleted_or_finished_while_the_store_is_read_is_not_restored(
    filled: Store, linker: CautiousLinker, monkeypatch: pytest.MonkeyPatch
) -> None:
    restore = LinkingRestore(linker, filled, 900)
    assert await restore.restore()
    linker.forget_trajectory("traj_0000")
    assert len(linker) == _TRAJECTORIES - 1
    read = filled.resume_state.open_leaves

    def read_and_forget(names: Answers) -> list[OpenLeaf]:
        found = [*read(names)]
        assert [stored.trajectory_id for stored in found] == ["traj_0000"]
        linker.forget_trajectory("traj_0000")
        return found

    with monkeypatch.context() as context:
        context.setattr(filled.resume_state, "open_leaves", read_and_forget)
        assert await restore.restore()
    assert len(linker) == _TRAJECTORIES - 1
    assert await restore.restore()  # the store still has it: it was only forgotten here
    assert len(linker) == _TRAJECTORIES


async def test_an_attempt_of_a_trajectory_that_is_finished_while_the_store_is_read_is_not_restored(
    store: Store, linker: CautiousLinker, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = [records.call_start(f"call_{name}", f"traj_{name}", at=time.time() - 5) for name in "ab"]
    store.calls.ship([records.ended(one, REPLY, choices=(), nodes=(), state="failed", status=502) for one in starts])
    read = store.resume_state.unanswered_calls

    def read_and_forget(since: float) -> list[UnansweredCall]:
        found = [*read(since)]
        linker.forget_trajectory("traj_a")
        return found

    monkeypatch.setattr(store.resume_state, "unanswered_calls", read_and_forget)
    assert await LinkingRestore(linker, store, 900).restore()
    assert (linker.version_of("traj_a"), linker.version_of("traj_b")) == (None, starts[1].version)


async def test_an_answer_is_continued_without_the_reminder_before_it(store: Store, linker: CautiousLinker) -> None:
    reminder, short = {"role": "user", "content": "It is 12:01."}, {"role": "assistant", "content": "ok"}
    start = records.call_start("call_a", "traj_a", [*records.QUESTION, reminder], at=time.time())
    end = records.ended(start, short, messages=[*records.QUESTION, reminder])
    (key,) = answer_keys([link_keys(records.QUESTION)[-1]], short)
    choice = msgspec.structs.replace(end.choices[0], skip_last_key=key)
    store.calls.ship([msgspec.structs.replace(end, choices=(choice,))])
    assert await LinkingRestore(linker, store, 900).restore()
    prompt = [*records.QUESTION, short, {"role": "user", "content": "And then?"}]
    link = linker.find_link(evidence(prompt, key_id=None))
    assert (link.trajectory_id, link.linked_by) == ("traj_a", "graph+gap")


@pytest.mark.parametrize(("most", "is_whole"), [(2, False), (_TRAJECTORIES + 2, True)])
async def test_a_history_that_may_not_have_been_restored_is_marked(
    filled: Store, linker: CautiousLinker, most: int, is_whole: bool
) -> None:
    """Above the limit, only the latest answers are restored: the history of another one may be of any trajectory.

    So may one that continues a restored answer, if that is short: an equal one may not have been restored.
    """
    distinctive = {"role": "assistant", "content": "The capital of Norway has been Oslo since 1814."}
    filled.calls.ship([records.ended(records.call_start("call_z", "traj_z", at=time.time()), distinctive)])
    assert await LinkingRestore(linker, filled, 900, most).restore()
    unknown = [*records.QUESTION, {"role": "assistant", "content": "Rome"}, {"role": "user", "content": "And then?"}]
    for prompt, moment, purpose in (
        (unknown, time.time(), "live" if is_whole else UNLINKED),
        (records.QUESTION, time.time(), "live"),  # it begins a conversation
        ([*records.QUESTION, REPLY, unknown[-1]], time.time(), "live" if is_whole else UNLINKED),
        ([*records.QUESTION, distinctive, unknown[-1]], time.time(), "live"),  # it is restored
        (unknown, time.time() + 901, "live"),
    ):
        assert linker.find_link(evidence(prompt, key_id=None, arrived_at=moment)).purpose == purpose


async def test_histories_are_marked_if_the_store_did_not_answer(
    filled: Store, linker: CautiousLinker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy of one process starts with nothing then, and serves."""

    def fail(*_: object) -> None:
        raise StoreUnavailable("the database is down")

    restore = LinkingRestore(linker, filled, 900)
    prompt = [*records.QUESTION, REPLY, NEXT]
    with monkeypatch.context() as broken:
        broken.setattr(filled.resume_state, "open_answers", fail)
        assert not await restore.restore()
    assert linker.find_link(evidence(prompt, key_id=None, arrived_at=time.time())).purpose == UNLINKED
    assert linker.find_link(evidence(records.QUESTION, key_id=None, arrived_at=time.time())).purpose == "live"
    assert await restore.restore()
    assert linker.find_link(evidence(prompt, key_id=None, arrived_at=time.time())).linked_by == "graph"


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE choices SET token_ids = :bytes WHERE call_id = 'call_z'",
        "UPDATE messages SET body = :bytes WHERE hash = (SELECT reply_node FROM choices WHERE call_id = 'call_z')",
    ],
)
async def test_a_damaged_trajectory_is_left_out_and_what_may_belong_to_it_is_marked(
    filled: Store, linker: CautiousLinker, damage: str
) -> None:
    filled.calls.ship([records.ended(records.call_start("call_z", "traj_z", at=time.time()), {**REPLY, "name": "z"})])
    with filled._engine.begin() as connection:
        connection.execute(sa.text(damage), {"bytes": b"\x01\xff" if "body" in damage else b"\x09"})
    restore = LinkingRestore(linker, filled, 900)
    await restore.start()
    assert len(linker) == _TRAJECTORIES
    unknown = [*records.QUESTION, {"role": "assistant", "content": "Rome"}, NEXT]
    assert linker.find_link(evidence(unknown, key_id=None, arrived_at=time.time())).purpose == UNLINKED
    filled.trajectories.seal("traj_z", now=time.time())
    await restore.start()
    assert linker.find_link(evidence(unknown, key_id=None, arrived_at=time.time())).purpose == "live"


async def test_only_what_is_not_known_is_read_again(
    filled: Store, linker: CautiousLinker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker was away, and its calls are in the store now: an answer, and the continuation of another."""
    service = LinkingRestore(linker, filled, 900)
    assert await service.restore()
    first = records.call_start("call_new", "traj_0007", at=time.time())
    more = records.call_start("call_more", "traj_0009", parent_call="call_0009", at=time.time())
    filled.calls.ship([records.ended(first, REPLY), msgspec.structs.replace(records.ended(more, REPLY), choices=())])
    found, read = Mock(wraps=filled.resume_state.open_leaves), list[str]()
    monkeypatch.setattr(filled.resume_state, "open_leaves", found)
    assert await service.restore()
    for one in found.call_args_list:
        read += one.args[0]
    assert sorted(read) == ["traj_0007", "traj_0009"]
    assert ("call_new", 0) in linker.answers_of("traj_0007")
    assert linker.answers_of("traj_0009")["call_0009", 0].is_extended


@pytest.mark.parametrize(("parent", "rule"), [(None, "resend"), ("call_gone", UNLINKED)])
def test_an_attempt_whose_parent_is_not_restored_is_not_repeated(
    linker: CautiousLinker, parent: str | None, rule: str
) -> None:
    """The repetition would be in the right trajectory without its parent."""
    prompt = [*records.QUESTION, REPLY, NEXT]
    names = ("traj_a", ATTEMPT.alias, 0, "live", ATTEMPT.key_id, ATTEMPT.prompt_node, ATTEMPT.tools_hash, "graph")
    linker.finish_restore(1.0, [UnansweredCall(*names, parent, 0, 1.0, 1.0)], is_whole=False)
    assert linker.find_link(evidence(prompt, attempt=ATTEMPT)).linked_by == rule
