"""What `ratchet status` and the API tell about a release."""

from __future__ import annotations

from typing import Any

from ratchet.store.reports.version_reports import describe_release, read_release
from ratchet.store.store import Store

FIGURES: dict[str, Any] = {
    "harm": 0.5, "enough": 1000.0, "counted": 12, "ramp_length": 256, "per_day": 300.0, "status": "the ramp goes on",
    "live_minus_anchor": {"value": 0.02, "low": -0.1, "high": 0.14, "count": 400},
    "detectable": {"day": 1.2, "week": 0.15, "month": 0.075}, "traffic_too_small": False,
    "deserved_round_size": 512, "round_size": 128,
}  # fmt: skip


def versions(store: Store, count: int) -> None:
    store.policies.register_base("agent", "base")
    for version in range(1, count + 1):
        held = store.rounds.start("agent", version - 1)
        store.rounds.commit(held.id, version=version, checkpoint=f"/c/{version}", groups=[], metrics={})


def described(store: Store, **more: bool) -> list[str]:
    found = read_release(store, "agent")
    assert found is not None
    return describe_release(found, **more)


def test_the_three_versions_that_serve_are_described_with_shares_evidence_and_what_the_traffic_can_show(
    store: Store,
) -> None:
    assert read_release(store, "agent") is None
    versions(store, 2)
    assert described(store) == ["serving       @0 live 100%; the anchor is @0"]
    store.policies.promote("agent", 1, {}, holdback=0.1)
    store.policies.start_ramp("agent", 2, 0.45)
    store.releases.record_evidence("agent", 2, FIGURES)
    assert described(store) == [
        "serving       @0 holdback 10%, @1 live 45%, @2 ramp 45%; the anchor is @0",
        "evidence      @2: 12 of 256 trajectories of its ramp are counted; evidence of harm 0.5, of 1000 that roll it "
        "back",
        "release       the ramp goes on",
        "live - anchor +0.020 (-0.100 to +0.140, at all times 95%), 400 trajectories since @0 became the anchor",
        "finds         a loss of 0.15 in a week, 0.07 in a month, in the median, at 300 scored trajectories a day",
        "round size    128 trajectories; about 512 would suit this traffic (trainer.groups_per_round, and "
        "round_wait_seconds so that a round can fill)",
    ]
    for size, line in (
        (300, "300 trajectories (trainer.groups_per_round); about 512 would suit this traffic"),
        (2048, "2048 trajectories; about 512 would suit this traffic (trainer.groups_per_round)"),
    ):
        store.releases.record_evidence("agent", 2, FIGURES | {"round_size": size})
        assert described(store)[-1] == f"round size    {line}"
    store.releases.record_evidence("agent", 2, FIGURES | {"traffic_too_small": True, "detectable": {"month": 1.5}})
    lines = described(store)
    assert any(line.startswith("TRAFFIC       is too small") for line in lines)
    assert any(line.startswith("finds         no loss below 1.00 in a month") for line in lines)
    assert described(store, unprotected=True)[-1].startswith("UNPROTECTED")


def test_a_pin_is_described_with_its_author_and_reason(store: Store) -> None:
    versions(store, 1)
    store.policies.pin("agent", 0, by="anna", reason="a fair")
    assert described(store)[1] == "PINNED        by anna: a fair; `ratchet policies unpin agent` ends it"
    store.policies.unpin("agent", by="anna", reason="over")
    assert len(described(store)) == 1
