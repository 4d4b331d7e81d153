"""The text about unproven versions: how many, the newest reason, and remedies that name them."""

from __future__ import annotations

from ratchet.store.reports.version_reports import read_unproven
from ratchet.store.store import Store


def commit(store: Store, version: int, reason: str) -> None:
    held = store.rounds.start("mail", version - 1)
    store.rounds.commit(held.id, version=version, checkpoint=f"c/{version}", groups=[], metrics={})
    store.policies.mark_unproven("mail", version, {}, reason=reason)


def test_the_newest_reason_and_the_remedies_are_shown_until_a_version_is_released(store: Store) -> None:
    store.policies.register_base("mail", "base")
    assert read_unproven(store, "mail") is None
    commit(store, 1, "lost in rounding")
    only = read_unproven(store, "mail")
    assert only is not None
    assert only.describe().startswith("1 version unproven: lost in rounding; mail@1 ")
    commit(store, 2, "replica 2 serves another adapter")
    found = read_unproven(store, "mail")
    assert found is not None
    text = found.describe()
    assert text.startswith("2 versions unproven: replica 2 serves another adapter; @1 to mail@2 ")
    assert "trainer.max_staleness" in text
    for remedy in ("vllm.dtype, learner.dtype", "restart a replica", "policies promote mail@2", "rollback mail@0"):
        assert remedy in text
    store.policies.promote("mail", 2, {})
    assert read_unproven(store, "mail") is None
