"""The draw of a version: shares are kept, coins of successive releases are independent, users draw once."""

from __future__ import annotations

import time
from collections import Counter
from itertools import product
from typing import Any

from ratchet.proxy.coordinator.versions.version_draws import VersionDraws
from ratchet.proxy.telemetry.metrics import ProxyMetrics
from ratchet.store.records import Policy, VersionDraw
from ratchet.store.states import PolicyState
from tests.harness.proxy.running_proxy import Proxy
from tests.harness.proxy.servers import eventually
from tests.harness.records import commit_round

BODY: Any = {"model": "agent", "messages": [{"role": "user", "content": "hi"}]}
NAMES = [f"traj_{number}" for number in range(20_000)]


def version(number: int, state: PolicyState, share: float | None = None) -> Policy:
    return Policy(
        alias="agent", version=number, state=state, served_name=f"agent@{number}", adapter="/a", created_at=1.0,
        share=share,
    )  # fmt: skip


def draws(*serving: Policy) -> VersionDraws:
    made = VersionDraws(ProxyMetrics())
    made.set_aliases(["agent"])
    made.replace(serving)
    return made


def ramp(number: int) -> VersionDraws:
    return draws(
        version(0, PolicyState.HOLDBACK, 0.1), version(1, PolicyState.LIVE), version(number, PolicyState.RAMP, 0.45)
    )


def chi_square(counts: Counter[Any], expected: dict[Any, float]) -> float:
    total = sum(counts.values())
    return sum((counts[place] - share * total) ** 2 / (share * total) for place, share in expected.items())


def test_versions_are_drawn_by_their_shares() -> None:
    drawn = ramp(2)
    counts = Counter(drawn.draw("agent", name)[0] for name in NAMES)
    assert chi_square(counts, {0: 0.1, 1: 0.45, 2: 0.45}) < 13.8, "the 0.999 quantile for two degrees of freedom"


def test_the_coins_of_successive_releases_and_of_other_shares_are_independent() -> None:
    first, shares = ramp(2), {0: 0.1, 1: 0.45}
    more = draws(
        version(0, PolicyState.HOLDBACK, 0.1), version(1, PolicyState.LIVE), version(2, PolicyState.RAMP, 0.449)
    )
    for second, newest in ((ramp(3), 3), (more, 2)):
        pairs = Counter((first.draw("agent", name)[0], second.draw("agent", name)[0]) for name in NAMES)
        expected = {
            (a, b): {**shares, 2: 0.45}[a] * {**shares, newest: 0.45}[b] for a, b in product((0, 1, 2), (0, 1, newest))
        }
        assert chi_square(pairs, expected) < 26.2, "the 0.999 quantile for eight degrees of freedom"


def test_a_unit_draws_once_under_the_same_shares_whatever_its_trajectories_are_called() -> None:
    drawn = ramp(2)
    for unit in ("a", "b", "c"):
        assert len({drawn.draw("agent", name, unit)[0] for name in NAMES[:50]}) == 1
    _, draw = drawn.draw("agent", "traj_1", "a")
    assert draw == VersionDraw(shares={0: 0.1, 1: 0.45, 2: 0.45}, unit="a")


def test_a_version_that_serves_alone_is_drawn_without_a_coin_and_shares_one_record() -> None:
    alone = draws(version(4, PolicyState.LIVE))
    one, other = alone.draw("agent", "a"), alone.draw("agent", "b")
    assert one == (4, VersionDraw(shares={4: 1.0}))
    assert one[1] is other[1]


def test_trajectories_store_their_draw_and_users_and_sessions_are_units(proxy: Proxy) -> None:
    commit_round(proxy.store, "agent", 1, checkpoint="/a/1")
    proxy.store.policies.start_ramp("agent", 1, 0.45)
    eventually(lambda: 'role="ramp"} 0.45' in proxy.http.get("/metrics").text)

    def begin(path: str = "", **more: Any) -> str:
        answer = proxy.http.post(f"{path}/v1/chat/completions", json=BODY | more)
        return str(answer.headers["x-ratchet-trajectory"])

    names = {
        "user": [begin(user="anna@example.org") for _ in range(4)],
        "metadata": [begin(metadata={"user_id": "anna@example.org"})],
        "other": [begin(user="bob")],
        "session": [begin("/t/session-1")],
        "none": [begin()],
        "version": [begin(model="agent@0")],
    }
    proxy.settled()
    runs = {kind: [proxy.store.trajectories.get(name) for name in found] for kind, found in names.items()}
    drawn = {kind: [run.draw for run in found] for kind, found in runs.items()}
    assert all(
        draw and draw.shares == {0: 0.55, 1: 0.45} for kind in names if kind != "version" for draw in drawn[kind]
    )
    users = {draw.unit for draw in (*drawn["user"], *drawn["metadata"]) if draw}
    assert len(users) == 1
    assert "anna" not in str(users)
    assert len({run.version for run in (*runs["user"], *runs["metadata"])}) == 1
    units = [users.pop(), *(draw.unit for kind in ("other", "session", "none") for draw in drawn[kind] if draw)]
    assert (len(set(units)), units[-1]) == (4, None)
    assert drawn["version"] == [None]
    counted = proxy.store.releases.outcomes("agent", "1", 0.0, deadline_seconds=0.0, until=time.time() + 1)
    assert len(counted) == 8
