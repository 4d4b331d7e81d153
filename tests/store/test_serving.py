"""Which versions serve, and which base model they belong to."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from ratchet.store.errors import InvalidTransition, RecordNotFound
from ratchet.store.policies import fingerprints
from ratchet.store.policies.serving import shares_in_force
from ratchet.store.records import BASE_VERSION
from ratchet.store.states import PolicyAction, PolicyState
from ratchet.store.store import Store, open_store
from tests.harness.records import call_start, commit_round, ended


def candidate(store: Store, parent: int) -> int:
    """Commit a round that goes on from a version; return the number of its candidate."""
    version = store.rounds.next_version("agent")
    commit_round(store, "agent", version, base=parent)
    return version


def newest(store: Store) -> int:
    """Return the version that training goes on from."""
    found = store.rounds.newest_committed("agent")
    return (found.to_version or 0) if found else 0


@pytest.fixture
def base(store: Store) -> Store:
    """A store with version 0 and three candidates."""
    store.policies.register_base("agent", "base")
    for parent in range(3):
        candidate(store, parent)
    return store


def states(store: Store) -> dict[int, str]:
    return {policy.version: str(policy.state) for policy in store.policies.all("agent")}


def shares(store: Store) -> dict[int, float]:
    return {version: round(share, 9) for version, share in shares_in_force(store.policies.serving()).items()}


def test_a_ramp_ends_with_the_old_version_held_back_and_the_next_one_leaves_it_there(base: Store) -> None:
    policies = base.policies
    policies.start_ramp("agent", 1, 0.45)
    assert shares(base) == {0: 0.55, 1: 0.45}
    policies.promote("agent", 1, {}, holdback=0.1)
    assert (states(base), shares(base)) == (
        {0: "holdback", 1: "live", 2: "candidate", 3: "candidate"}, {0: 0.1, 1: 0.9},
    )  # fmt: skip
    policies.skip("agent", 2, {}, by="release", reason="version 3 is newer")
    policies.start_ramp("agent", 3, 0.45)
    assert shares(base) == {0: 0.1, 1: 0.45, 3: 0.45}
    policies.set_share("agent", 0, 0.3, {"doubt": 1.5}, by="release", reason="in doubt")
    assert shares(base) == {0: 0.3, 1: 0.25, 3: 0.45}
    policies.promote("agent", 3, {}, holdback=0.1)
    assert (states(base), shares(base)) == (
        {0: "holdback", 1: "retired", 2: "retired", 3: "live"}, {0: 0.1, 3: 0.9},
    )  # fmt: skip
    policies.move_anchor("agent", {"better": 20.5}, by="release", reason="shown better")
    assert (states(base)[0], shares(base)) == ("retired", {3: 1.0})
    found = base.decisions.decisions_of("agent")
    assert [(one.version, str(one.action)) for one in found] == [
        (3, "anchor"), (3, "promote"), (0, "share"), (3, "ramp"), (2, "skip"), (1, "promote"), (1, "ramp"),
    ]  # fmt: skip
    assert found[0].evidence == {"better": 20.5, "before": 0, "shares": {"3": 1.0}}
    assert found[2].evidence == {"doubt": 1.5, "share": 0.3, "shares": {"0": 0.3, "1": 0.25, "3": 0.45}}
    with pytest.raises(InvalidTransition, match="the live version is the anchor already"):
        policies.move_anchor("agent", {}, by="release", reason="again")


def test_a_rollback_in_the_ramp_goes_to_the_live_version_and_later_to_the_anchor(base: Store) -> None:
    policies = base.policies
    policies.promote("agent", 1, {}, holdback=0.1)
    policies.start_ramp("agent", 2, 0.45)
    assert [one.version for one in policies.roll_back("agent", 1, {"harm": 1000.0}, by="release", reason="worse")] == [
        2, 3,
    ]  # fmt: skip
    assert (states(base), shares(base)) == (
        {0: "holdback", 1: "live", 2: "rejected", 3: "rejected"}, {0: 0.1, 1: 0.9},
    )  # fmt: skip
    assert base.decisions.decisions_of("agent", 2)[0].evidence == {"harm": 1000.0, "shares": {"0": 0.1, "1": 0.9}}
    policies.roll_back("agent", 0, {"harm": 1000.0}, by="release", reason="worse")
    assert (states(base)[0], states(base)[1], shares(base)) == ("live", "rejected", {0: 1.0})


def test_a_round_whose_parent_was_rejected_meanwhile_makes_no_version(base: Store) -> None:
    held = base.rounds.start("agent", 3)
    base.policies.promote("agent", 2, {})
    base.policies.roll_back("agent", 0, {}, by="anna", reason="rude")
    with pytest.raises(InvalidTransition, match="agent@3 was rejected while round"):
        base.rounds.commit(held.id, version=4, checkpoint="/c/4", groups=[], metrics={})
    assert 4 not in states(base)
    assert candidate(base, 0) == 4


def test_a_pinned_version_serves_alone_until_it_is_unpinned(base: Store) -> None:
    policies = base.policies
    policies.promote("agent", 1, {}, holdback=0.1)
    policies.start_ramp("agent", 2, 0.45)
    with pytest.raises(InvalidTransition, match=r"agent@2 is ramp.* live"):
        policies.pin("agent", 2, by="anna", reason="a fair")
    assert policies.pin("agent", 1, by="anna", reason="a fair").pinned_at is not None
    assert (states(base), shares(base)) == ({0: "retired", 1: "live", 2: "retired", 3: "candidate"}, {1: 1.0})
    forbidden: list[Callable[[], object]] = [
        lambda: policies.start_ramp("agent", 3, 0.45),
        lambda: policies.promote("agent", 3, {}),
        lambda: policies.promote_manually("agent", 3, by="bob", reason="better"),
        lambda: policies.roll_back("agent", 0, {}, by="release", reason="worse"),
        lambda: policies.pin("agent", 1, by="bob", reason="again"),
    ]
    for decide in forbidden:
        with pytest.raises(InvalidTransition, match=r"agent@1 .*`ratchet policies unpin agent`"):
            decide()
    policies.unpin("agent", by="anna", reason="the fair is over")
    with pytest.raises(InvalidTransition, match="no version of agent is pinned"):
        policies.unpin("agent", by="anna", reason="again")
    policies.start_ramp("agent", 3, 0.45)
    newest = base.decisions.decisions_of("agent", 1)[:2]
    assert [(one.action, one.reason) for one in newest] == [
        (PolicyAction.UNPIN, "the fair is over"), (PolicyAction.PIN, "a fair"),
    ]  # fmt: skip


def test_of_two_decisions_on_the_same_versions_the_later_fails(base: Store, store_url: str) -> None:
    other = open_store(store_url)
    known = other.policies.serving_of("agent")
    base.policies.promote("agent", 1, {}, holdback=0.1)
    early = other.policies._decide("agent", known)  # as a verb that looked before the promotion
    with pytest.raises(InvalidTransition, match="changed by another process"), early:
        pass
    other.close()


def test_shares_leave_some_for_the_live_version(base: Store) -> None:
    base.policies.promote("agent", 1, {}, holdback=0.3)
    with pytest.raises(InvalidTransition, match="leave some for the live version"):
        base.policies.start_ramp("agent", 2, 0.7)
    assert states(base)[2] == "candidate"


def test_going_back_by_hand_skips_versions_that_never_served(base: Store) -> None:
    base.policies.promote("agent", 1, {}, holdback=0.1)
    base.policies.skip("agent", 2, {}, by="release", reason="3 is newer")
    base.policies.start_ramp("agent", 3, 0.45)
    base.policies.promote_manually("agent", None, by="anna", reason="fine")
    assert (states(base), shares(base)) == (
        {0: "holdback", 1: "retired", 2: "retired", 3: "live"}, {0: 0.1, 3: 0.9},
    )  # fmt: skip
    rejected = base.policies.roll_back_manually("agent", None, by="anna", reason="not fine")
    assert ([one.version for one in rejected], shares(base)) == ([2, 3], {0: 0.1, 1: 0.9})


def test_a_persons_decision_keeps_what_was_known_of_the_version(base: Store) -> None:
    policies, known = base.policies, {"harm": 31.5, "counted": 9}
    policies.start_ramp("agent", 1, 0.45)
    base.releases.record_evidence("agent", 1, known)
    policies.hold_manually("agent", None, by="anna", reason="wait")
    policies.promote_manually("agent", None, by="anna", reason="fine")
    policies.roll_back_manually("agent", 0, by="anna", reason="not fine", now=True)
    found = [(str(one.action), dict(one.evidence)) for one in base.decisions.decisions_of("agent", 1)]
    assert found[:3] == [
        ("rollback", {"known": known, "now": True, "shares": {"0": 1.0}}),
        ("promote", {"known": known, "shares": {"0": 0.1, "1": 0.9}}),
        ("hold", {"known": known}),
    ]


def test_moving_open_trajectories_after_a_rollback_is_a_decision_too(base: Store) -> None:
    base.policies.promote("agent", 1, {})
    base.policies.roll_back_manually("agent", 0, by="anna", reason="rude")
    assert base.policies.roll_back_manually("agent", 0, by="anna", reason="it deletes mails", now=True) == []
    newest = base.decisions.decisions_of("agent", 1)[0]
    assert (newest.action, newest.reason) == (PolicyAction.ROLLBACK, "it deletes mails")
    with pytest.raises(InvalidTransition, match="there is nothing to roll back"):
        base.policies.roll_back_manually("agent", 0, by="anna", reason="again", now=True)


@pytest.mark.parametrize("seed", range(6))
def test_after_any_decisions_one_version_is_live_between_the_held_back_one_and_the_ramp(base: Store, seed: int) -> None:
    chance, policies = random.Random(seed), base.policies
    by: dict[str, Any] = {"by": "chance", "reason": "a draw"}
    decisions: list[Callable[[int], object]] = [
        lambda _: candidate(base, newest(base)),
        lambda version: policies.start_ramp("agent", version, chance.uniform(0.05, 0.9)),
        lambda version: policies.promote("agent", version, {}, holdback=chance.choice([0.0, 0.1, 0.3])),
        lambda version: policies.promote_manually("agent", chance.choice([None, version]), rejected=True, **by),
        lambda version: policies.set_share("agent", version, chance.uniform(0.05, 0.9), **by),
        lambda version: policies.roll_back("agent", version, {}, **by),
        lambda version: policies.roll_back_manually("agent", chance.choice([None, version]), **by),
        lambda version: policies.skip("agent", version, {}, **by),
        lambda version: policies.reject("agent", version, {}),
        lambda version: policies.pin("agent", version, **by),
        lambda _: policies.unpin("agent", **by),
        lambda _: policies.move_anchor("agent", {}, **by),
    ]
    taken = 0
    for _ in range(60):
        version = chance.choice(list(states(base)))
        try:
            chance.choice(decisions)(version)
            taken += 1
        except (InvalidTransition, RecordNotFound):
            pass
        places = {state: [v for v, one in states(base).items() if one == state] for state in PolicyState}
        (live,) = places[PolicyState.LIVE]
        assert len(places[PolicyState.HOLDBACK]) <= 1 >= len(places[PolicyState.RAMP])
        assert [*places[PolicyState.HOLDBACK], live, *places[PolicyState.RAMP]] == sorted(shares(base))
        assert abs(sum(shares(base).values()) - 1.0) < 1e-6
        assert min(shares(base).values()) > 0
    assert taken > 5


@pytest.mark.slow
def test_decisions_of_several_processes_at_once_leave_one_version_live(base: Store, store_url: str) -> None:
    by: dict[str, Any] = {"by": "chance", "reason": "a draw"}
    unexpected: list[Exception] = []

    def decide(seed: int) -> None:
        chance, own = random.Random(seed), open_store(store_url)
        for _ in range(15):
            version = chance.randrange(6)
            decisions: list[Callable[[], object]] = [
                lambda: candidate(own, newest(own)),
                lambda: own.policies.start_ramp("agent", version, 0.3),  # noqa: B023 -- called at once
                lambda: own.policies.promote_manually("agent", None, **by),
                lambda: own.policies.promote("agent", version, {}, holdback=0.1),  # noqa: B023 -- likewise
                lambda: own.policies.roll_back("agent", version, {}, **by),  # noqa: B023 -- likewise
                lambda: own.policies.roll_back_manually("agent", None, now=True, **by),
            ]
            try:
                chance.choice(decisions)()
            except (InvalidTransition, RecordNotFound):
                continue
            except Exception as error:  # noqa: BLE001 -- reported by the test
                unexpected.append(error)
        own.close()

    threads = [threading.Thread(target=decide, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert unexpected == []
    assert list(states(base).values()).count("live") == 1
    serving = {state: version for version, state in states(base).items() if state in ("holdback", "live", "ramp")}
    assert list(serving.values()) == sorted(serving.values()) == sorted(shares(base))
    assert sorted(serving) == list(serving), "holdback below live below ramp"


FILES = {"config": "c", "weights": "w", "tokenizer": "t", "chat_template": "x"}
SERVED: dict[str, Any] = {"tokens": [1, 2], "rendered": [3, 4], "likeliest": [{"token_id:1": -0.1}]}


def test_every_version_belongs_to_the_base_model_of_version_0(store: Store) -> None:
    assert store.base_models.register_base_model("agent", "/m", file_digests=FILES) is None  # nothing is registered yet
    store.policies.register_base("agent", "base")
    known = store.base_models.register_base_model("agent", "/m", file_digests=FILES)
    assert known is not None
    assert (known.name, known.file_digests, known.server_fingerprint) == ("/m", FILES, {})
    commit_round(store, "agent", 1, base=BASE_VERSION)
    store.policies.register_prompt_version("agent", store.prompts.register("Be brief.").id, {})
    for version in (0, 1, 2):
        assert store.base_models.base_model_of("agent", version) == known
    assert store.base_models.base_model_of("agent", 3) is None


def test_versions_of_before_are_given_the_base_model_that_is_taken_up_first(store: Store) -> None:
    store.policies.register_base("agent", "base")
    commit_round(store, "agent", 1, base=BASE_VERSION)
    assert store.base_models.base_model_of("agent", 1) is None
    store.base_models.register_base_model("agent", "/m", file_digests=FILES)
    found = store.base_models.base_model_of("agent", 1)
    assert found is not None
    assert found.differing_parts(FILES) == []
    assert found.differing_parts({**FILES, "weights": "other"}) == ["weights"]
    assert found.differing_parts({}) == []


def test_what_is_known_of_a_base_model_is_completed_and_never_replaced(store: Store) -> None:
    store.policies.register_base("agent", "base")
    store.base_models.register_base_model("agent", "http://far", server_fingerprint=SERVED)
    found = store.base_models.register_base_model("agent", "/m", file_digests=FILES, server_fingerprint={"tokens": [9]})
    assert found is not None
    assert (found.name, found.file_digests, found.server_fingerprint) == ("/m", FILES, SERVED)
    again = store.base_models.register_base_model("agent", "/other", file_digests={"weights": "other"})
    assert again == found


def test_a_base_model_is_forgotten_only_while_nothing_rests_on_it(store: Store) -> None:
    store.policies.register_base("agent", "base")
    store.base_models.register_base_model("agent", "/m", file_digests=FILES, server_fingerprint=SERVED)
    assert store.base_models.clear_base_model("agent")
    assert store.base_models.base_model_of("agent") is None
    store.base_models.register_base_model("agent", "/n", file_digests=FILES, server_fingerprint=SERVED)
    store.calls.ship([ended(call_start("call_1", "t1"), {"role": "assistant", "content": "hello"})])
    assert not store.base_models.clear_base_model("agent")
    assert store.base_models.clear_base_model("agent", served_only=True)
    found = store.base_models.base_model_of("agent")
    assert found is not None
    assert (found.name, found.file_digests, found.server_fingerprint) == ("/n", FILES, {})


def _tops(seed: int, noise: float = 0.0, noise_seed: int = 0) -> list[dict[str, float]]:
    """The likeliest tokens of a model with its own weights, as one of its servers shows them."""
    own, shaken = random.Random(seed), random.Random(noise_seed)
    return [
        {f"token_id:{own.randrange(100)}": -place - own.random() + shaken.gauss(0, noise) for place in range(10)}
        for _ in range(8)
    ]


def test_noise_of_number_types_and_hardware_is_no_other_model_and_another_model_is() -> None:
    for seed in range(50):
        known = SERVED | {"likeliest": _tops(seed)}
        assert fingerprints.difference(known, SERVED | {"likeliest": _tops(seed, 0.04, seed + 1)}) is None
        other = fingerprints.difference(known, SERVED | {"likeliest": _tops(seed + 1000)})
        assert other is not None
        assert "nats" in other


def test_other_tokens_and_another_template_are_seen_and_a_date_in_the_template_is_not() -> None:
    known = SERVED | {"rendered": list(range(60))}
    dated = [*range(20), *range(900, 906), *range(26, 60)]
    assert fingerprints.difference(known, known | {"rendered": dated}) is None
    assert fingerprints.difference(known, known | {"rendered": list(range(100, 160))}) == (
        "its chat template gives other prompts"
    )
    assert fingerprints.difference(known, known | {"tokens": [1, 3]}) == "its tokenizer gives other ids"
    assert fingerprints.difference(known, {}) is None  # a server without answers has no difference
