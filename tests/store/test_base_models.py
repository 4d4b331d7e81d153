"""Which base model the versions of an alias belong to, on both databases; and how two servers are distinguished."""

from __future__ import annotations

import random
from typing import Any

from ratchet.store.policies import fingerprints
from ratchet.store.records import BASE_VERSION
from ratchet.store.store import Store
from tests.harness.records import call_start, commit_round, ended

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
