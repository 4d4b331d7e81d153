"""Several agents in one store: each list and count can be limited to one of them."""

from __future__ import annotations

import time

import pytest

from ratchet.store.errors import InvalidRecord
from ratchet.store.ids import first_id, moment, new_id
from ratchet.store.records import Feedback
from ratchet.store.states import KeyScope
from ratchet.store.store import Store
from tests.harness.records import call_start, ended

REPLY = {"role": "assistant", "content": "Oslo"}


@pytest.fixture
def keys(store: Store) -> tuple[str, str]:
    """Two keys; `mail` was called with both, `support` with the second."""
    made = [store.keys.create(f"key {n}", str(n) * 64, KeyScope.AGENT).id for n in range(2)]
    records = [("mail", made[0], "a"), ("mail", made[0], "a"), ("mail", made[1], "b"), ("support", made[1], "c")]
    for agent, key, run in records:
        store.calls.ship([ended(call_start(new_id("call"), run, alias=agent, key_id=key), REPLY, prompt=(1, 2, 3))])
    store.calls.ship([ended(call_start(first_id("call", time.time() - 9e4), "old", alias="mail"), REPLY)])
    return made[0], made[1]


def test_an_agent_whose_name_differs_by_case_from_one_with_versions_is_refused(store: Store) -> None:
    store.policies.register_base("mail", "base")
    store.policies.register_base("Mail", "base")  # nothing is lost yet
    store.rounds.adopt("mail", version=1, checkpoint="/c/1", origin={}, reason="copied")
    with pytest.raises(InvalidRecord, match=r"MAIL: .* mail, .* case"):
        store.policies.register_base("MAIL", "base")
    assert store.policies.register_base("mail", "other").served_name == "other"


@pytest.mark.usefixtures("keys")
def test_lists_and_counts_are_limited_to_an_agent(store: Store) -> None:
    assert {call.alias for call in store.calls.page(alias="support", tokens=False)} == {"support"}
    assert len(store.calls.page(alias="mail", tokens=False)) == 4
    store.trajectories.seal("c", 99.0)
    assert store.trajectories.counts()["open"] == 3
    assert (store.trajectories.counts("mail")["open"], store.trajectories.counts("support")["sealed"]) == (3, 1)
    assert store.trajectories.counts("nobody")["open"] == 0
    assert store.trajectories.drop_counts("mail") == {}
    texts = [Feedback(id=f"fb_{run}", kind="trajectory", target=run, source="operator", given_at=5.0, value=1.0,
                      trusted=True) for run in ("a", "c", "unknown")]  # fmt: skip
    store.feedback.add(texts)
    assert [one.id for one in store.feedback.page(alias="support")] == ["fb_c"]
    assert len(store.feedback.page()) == 3


def test_ids_of_a_moment_begin_at_its_first_id() -> None:
    before = time.time()
    assert first_id("call", before) <= new_id("call") < first_id("call", before + 60)
    assert moment(first_id("call", 1234.5)) == 1234.5
