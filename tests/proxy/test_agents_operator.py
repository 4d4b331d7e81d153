"""The operator API of several agents: every list can be limited to one; keys and usage show what belongs to whom."""

from __future__ import annotations

from typing import Any

import pytest

from ratchet.store.states import KeyScope
from ratchet.store.store import Store
from tests.harness.proxy.running_proxy import Proxy, Start
from tests.harness.proxy.servers import eventually
from tests.proxy.test_agents import AGENTS, BODIES, call, several
from tests.proxy.test_keys import bearer, made
from tests.proxy.test_metrics import value


@pytest.fixture
def proxy(start: Start, store: Store) -> Proxy:
    """A proxy of three agents with a call of two of them, and a group, an alarm and feedback of each."""
    proxy = start(**several())
    for agent in AGENTS[:2]:
        for path in BODIES:
            assert call(proxy, agent, path).status_code == 200
    proxy.settled()
    for agent in AGENTS[:2]:
        names = [run.id for run in store.trajectories.page() if run.alias == agent]
        assert proxy.http.post("/api/feedback", json={"trajectory_id": names[0], "value": 1}).status_code == 201
        for name in names:
            store.trajectories.seal(name, 1e10)
        store.groups.create(f"task:{agent}", agent, names, now=1e10)
        store.alarms.raise_(f"no_signal:{agent}", "no variance")
    store.alarms.raise_("proxy_journal_lost", "of no agent")
    proxy.settled()
    eventually(lambda: len(proxy.http.get("/api/feedback").json()["data"]) == 2)
    return proxy


def rows(proxy: Proxy, path: str, **query: Any) -> list[dict[str, Any]]:
    answer = proxy.http.get(f"/api/{path}", params=query)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["data"]
    return found


@pytest.mark.parametrize(("path", "count"), [("calls", 4), ("trajectories", 4), ("groups", 1), ("policies", 1)])
def test_a_list_of_one_agent_has_its_records_only(proxy: Proxy, path: str, count: int) -> None:
    for agent in AGENTS[:2]:
        assert [row["alias"] for row in rows(proxy, path, alias=agent)] == [agent] * count
    assert len(rows(proxy, path)) == (3 if path == "policies" else 2 * count)
    assert rows(proxy, path, alias="nobody") == []


def test_feedback_alarms_and_counts_are_those_of_one_agent(proxy: Proxy, store: Store) -> None:
    runs = {run.id: run.alias for run in store.trajectories.page()}
    assert [runs[row["trajectory_id"]] for row in rows(proxy, "feedback", alias="mail")] == ["mail"]
    assert {row["name"] for row in rows(proxy, "alarms", alias="mail")} == {"no_signal:mail", "proxy_journal_lost"}
    assert {row["name"] for row in rows(proxy, "alarms", alias="code")} == {"proxy_journal_lost"}
    training = proxy.http.get("/api/training", params={"alias": "mail"}).json()
    assert (training["trajectories"]["grouped"], training["trajectories"]["open"]) == (4, 0)
    overview = proxy.http.get("/api/overview", params={"alias": "mail"}).json()
    assert [one["alias"] for one in overview["aliases"]] == ["mail"]
    assert overview["trajectories"]["grouped"] == 4
    assert len(proxy.http.get("/api/overview").json()["aliases"]) == 3


def test_agents_are_listed_with_their_state(proxy: Proxy, store: Store) -> None:
    store.policies.register_base("former", "tiny-base")
    states = {row["agent"]: (row["state"], row["live_version"]) for row in rows(proxy, "agents")}
    assert states == dict.fromkeys(AGENTS, ("serving", 0)) | {"former": ("not_served", 0)}


def test_usage_is_counted_by_agent_and_key(start: Start, store: Store) -> None:
    one, first = made(store, agents=("mail",))
    two, second = made(store)
    boss, _ = made(store, KeyScope.OPERATOR)
    proxy = start(**several())
    for key, agent in ((one, "mail"), (two, "mail"), (two, "support"), (two, "support")):
        assert call(proxy, agent, key=key).status_code == 200
    proxy.settled()
    answer = proxy.http.get("/api/usage", headers=bearer(boss)).json()["data"]
    calls = {(row["alias"], row["key_id"], row["purpose"]): row["calls"] for row in answer}
    assert calls == {("mail", first.id, "live"): 1, ("mail", second.id, "live"): 1, ("support", second.id, "live"): 2}
    stored = store.calls.page()
    assert sum(row["prompt_tokens"] for row in answer) == sum(one.prompt_tokens for one in stored) > 0
    only = proxy.http.get("/api/usage", params={"alias": "support"}, headers=bearer(boss)).json()["data"]
    assert [row["alias"] for row in only] == ["support"]
    listed = proxy.http.get("/api/keys", headers=bearer(boss)).json()["data"]
    assert [row["agents"] for row in listed] == [["mail"], None, None]
    assert not any("hash" in row for row in listed)
    assert proxy.http.get("/api/keys", headers=bearer(one)).status_code == 403


def test_metrics_are_counted_by_agent(proxy: Proxy) -> None:
    for name in ("ratchet_calls_total", "ratchet_links_total"):
        assert [value(proxy, name, alias=agent) for agent in AGENTS] == [4, 4, 0]
    assert value(proxy, "ratchet_tokens_total", alias="mail") == value(proxy, "ratchet_tokens_total", alias="support")
    assert value(proxy, "ratchet_context_tokens_total", alias="mail") > 0
    call(proxy, "no-agent-of-ours")
    assert "no-agent-of-ours" not in proxy.http.get("/metrics").text, "clients add no label"
