"""Several agents behind one proxy: each has its own model names, versions, keys and lists."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from ratchet.proxy.settings import ProxySettings
from ratchet.store.states import KeyScope
from ratchet.store.store import Store
from tests.harness.ports import free_port
from tests.harness.proxy.running_proxy import Proxy, Start, running
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import eventually, served
from tests.harness.records import commit_round
from tests.proxy.test_keys import bearer, made
from tests.proxy.test_metrics import value
from tests.proxy.test_other_models import entry
from tests.proxy.test_rollouts import plan
from tests.proxy.test_settings import alarms, other, probe_results

AGENTS = ("mail", "support", "code")
USER: Any = {"role": "user", "content": "hi"}
SAY: Any = [{"role": "user", "content": "#say=yes"}]
BODIES: dict[str, Any] = {  # a request of each dialect
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [USER], "max_tokens": 9},
}


def several(**more: Any) -> dict[str, Any]:
    return {"model": "", "agents": AGENTS, **more}


@pytest.fixture
def proxy(start: Start) -> Proxy:
    """A proxy that serves three agents."""
    return start(**several())


def call(proxy: Proxy, model: str, path: str = "/v1/chat/completions", key: str = "k", **more: Any) -> Any:
    body = {**BODIES["/v1/" + path.partition("/v1/")[2]], "model": model}
    return proxy.http.post(path, json=body | more, headers=bearer(key))


# --- settings ----------------------------------------------------------------------------------------------------

VALUES: Any = {"upstreams": ("http://a",), "store": "-", "journal": Path("j")}


@pytest.mark.parametrize(
    ("agents", "says"),
    [
        (("mail", "Mail"), "'mail' and 'Mail' differ by case only"),
        (("stra\xdfe", "STRASSE"), "differ by case only"),
        (("mail", "mail"), "named twice"),
        (("mail@2",), "contains '@'"),
        (("a/b",), "contains '/'"),
        (("a b",), "contains ' '"),
        (("a\x00b",), "contains"),
        (("\N{RIGHT-TO-LEFT OVERRIDE}liam",), "contains"),
        (("ma\N{ZERO WIDTH SPACE}il",), "contains"),
        (("",), "1 to 100 characters"),
        (("x" * 101,), "1 to 100 characters"),
        ((), "no agent is named"),
    ],
)
def test_agents_that_cannot_be_served_together_are_refused(agents: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ProxySettings(**VALUES, agents=agents)


def test_a_single_agent_is_written_in_short() -> None:
    assert ProxySettings(**VALUES, model="mail").agents == ("mail",)
    with pytest.raises(ValueError, match="model and agents exclude each other"):
        ProxySettings(**VALUES, model="mail", agents=("mail", "support"))


def test_an_agent_and_another_model_may_not_differ_by_case_only() -> None:
    with pytest.raises(ValueError, match="Mail is the name of an agent"):
        ProxySettings(**VALUES, agents=AGENTS, model_list=(entry("http://a", name="Mail"),))


# --- version 0, versions, names ----------------------------------------------------------------------------------


def test_version_0_of_every_agent_is_the_one_served_base_model(proxy: Proxy, vllm: ScriptedVllm) -> None:
    for agent in AGENTS:
        assert call(proxy, agent).headers["x-ratchet-policy"] == f"{agent}@0"
    assert {body["model"] for body in vllm.calls} == {vllm.base}
    of = proxy.store.base_models.base_model_of
    eventually(lambda: all((known := of(agent)) and known.server_fingerprint for agent in AGENTS))
    assert len({str(known.server_fingerprint) for agent in AGENTS if (known := of(agent))}) == 1
    instance = eventually(lambda: proxy.store.proxy_instances.running("support", time.time() - 5))[0]
    assert instance.live_versions == dict.fromkeys(AGENTS, 0)


@pytest.mark.parametrize("path", [*BODIES, "/v1/messages/count_tokens"])
def test_a_call_need_not_name_the_only_agent(start: Start, path: str) -> None:
    others = (entry("http://127.0.0.1:9", name="helper", key=None),)
    proxy = start(model_list=others, agent_limits={"agent": {"requests_per_minute": 3}})
    body = BODIES.get(path, {"messages": [USER]})
    for unnamed in ({}, {"model": None}, {"model": ""}):
        answer = proxy.http.post(path, json=body | unnamed)
        assert answer.status_code == 200
        assert answer.headers.get("x-ratchet-policy", "agent@0") == "agent@0"
    limited = proxy.http.post("/v1/chat/completions", json=BODIES["/v1/chat/completions"])
    assert limited.status_code == (200 if path.endswith("count_tokens") else 429)


@pytest.mark.parametrize("path", [*BODIES, "/v1/messages/count_tokens"])
def test_a_call_that_names_none_of_several_agents_is_refused(proxy: Proxy, path: str) -> None:
    body = BODIES.get(path, {"messages": [USER]})
    refused = proxy.http.post(path, json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("model: field required")
    assert all(agent in refused.json()["error"]["message"] for agent in AGENTS)


def test_a_vllm_that_names_its_base_model_otherwise_after_a_restart_is_found_again(
    store: Store, tmp_path: Path
) -> None:
    port = free_port()
    with ExitStack() as first, ExitStack() as stack:
        url = first.enter_context(served(ScriptedVllm("started-by-hand"), port))
        proxy = stack.enter_context(running(url, store, tmp_path, **several()))
        assert call(proxy, "support").status_code == 200
        first.close()
        stack.enter_context(served(ScriptedVllm("another-name"), port))
        eventually(lambda: all(call(proxy, agent).status_code == 200 for agent in AGENTS))
        assert {store.policies.get(agent, 0).served_name for agent in AGENTS} == {"another-name"}


def test_each_agent_serves_its_own_live_version(proxy: Proxy, vllm: ScriptedVllm) -> None:
    commit_round(proxy.store, "support", 1, checkpoint="/adapters/1")
    proxy.store.policies.promote("support", 1, {})
    eventually(lambda: call(proxy, "support").headers["x-ratchet-policy"] == "support@1")
    assert call(proxy, "mail").headers["x-ratchet-policy"] == "mail@0"
    assert vllm.loads == ["support@1"]
    refused = call(proxy, "mail@1")
    assert refused.status_code == 404
    assert "mail@0" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [("Mail", "did you mean 'mail'?"), ("suport", "did you mean 'support'?"), ("SUPPORT@0", "did you mean 'support'?"),
     ("mail ", "did you mean 'mail'?"), ("gpt-4o", "there are: mail, support, code"),
     ("../mail", "did you mean 'mail'?"), ("mail@-1", "there are"), ("mail\x00", "did you mean 'mail'?"),
     ("\N{CYRILLIC SMALL LETTER A}" * 5000, "there are"), ("%s%n{0}", "there are"), ("", "there are")],
)  # fmt: skip
@pytest.mark.parametrize("path", [*BODIES, "/v1/messages/count_tokens", "/v1/embeddings"])
def test_an_unknown_name_gets_404_with_the_nearest_agent(start: Start, wrong: str, hint: str, path: str) -> None:
    proxy = start(**several())
    body = BODIES.get(path, BODIES["/v1/messages"])
    refused = proxy.http.post(path, json={**body, "model": wrong})
    if wrong == "":
        assert refused.status_code in (400, 404)
        return
    assert refused.status_code == 404
    error = refused.json()["error"]
    assert hint in error["message"]
    assert len(error["message"]) < 1000
    if path.startswith("/v1/messages"):
        assert (error["type"], refused.json()["type"]) == ("not_found_error", "error")
    else:
        assert (error["code"], error["param"]) == ("model_not_found", "model")


# --- linking -----------------------------------------------------------------------------------------------------


def test_concurrent_agents_in_every_dialect_keep_their_trajectories_apart(proxy: Proxy) -> None:
    """Every agent sends the same prompts with the same key at the same time."""

    def converse(number: int) -> tuple[str, set[str]]:
        agent, path = AGENTS[number % 3], list(BODIES)[number % 4]
        stream = bool(number % 2)
        answer = call(proxy, agent, path, stream=stream)
        assert answer.status_code == 200, answer.text
        ids = {answer.headers["x-ratchet-trajectory"]}
        if path == "/v1/chat/completions" and not stream:
            reply = answer.json()["choices"][0]["message"]
            follow = [USER, {"role": "assistant", "content": reply["content"]}, USER]
            ids.add(call(proxy, agent, messages=follow).headers["x-ratchet-trajectory"])
        return agent, ids

    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(converse, range(120)))
    proxy.settled()
    runs = {run.id: run.alias for run in proxy.store.trajectories.page(1000)}
    for agent, ids in found:
        assert {runs[name] for name in ids} == {agent}
    calls = proxy.store.calls.page(1000)
    assert all(one.alias == runs[one.trajectory_id] for one in calls)
    parents = {one.id: one.alias for one in calls}
    assert all(parents[one.parent_call] == one.alias for one in calls if one.parent_call)
    assert Counter(runs.values()).keys() == set(AGENTS)


@pytest.mark.parametrize("named", ["path", "header"])
def test_a_trajectory_named_by_two_agents_becomes_one_of_each(proxy: Proxy, named: str) -> None:
    path = "/t/job/v1/chat/completions" if named == "path" else "/v1/chat/completions"
    headers = {} if named == "path" else {"x-session-id": "job"}

    def ask(agent: str) -> str:
        body = {"model": agent, "messages": [USER]}
        answer = proxy.http.post(path, json=body, headers={**bearer("k"), **headers})
        return str(answer.headers["x-ratchet-trajectory"])

    assert [ask(agent) for agent in ("mail", "support", "mail", "support", "code")] == [
        "job", "job~support", "job", "job~support", "job~code"]  # fmt: skip
    proxy.settled()
    assert {run.id: (run.alias, run.calls) for run in proxy.store.trajectories.page()} == {
        "job": ("mail", 2), "job~support": ("support", 2), "job~code": ("code", 1)}  # fmt: skip


def test_a_forgotten_trajectory_of_one_agent_is_not_continued_by_another(
    start: Start, store: Store, tmp_path: Path
) -> None:
    proxies = [start(journal=tmp_path / f"journal-{n}", **several()) for n in range(2)]
    for proxy, agent in zip(proxies, ("mail", "support"), strict=True):  # the second proxy does not know the first's
        assert call(proxy, agent, "/t/job/v1/chat/completions").status_code == 200
        proxy.settled()
    runs = {run.id: run.alias for run in store.trajectories.page()}
    assert runs == {"job": "mail", "job~1": "support"}


def test_a_response_continued_by_another_agent_is_a_new_trajectory_with_its_content(
    proxy: Proxy, vllm: ScriptedVllm
) -> None:
    first = call(proxy, "mail", "/v1/responses", input="#say=sesame")
    more = call(proxy, "support", "/v1/responses", input="and?", previous_response_id=first.json()["id"])
    assert "sesame" in str(vllm.calls[-1]["messages"])
    again = call(proxy, "mail", "/v1/responses", input="and?", previous_response_id=first.json()["id"])
    assert again.headers["x-ratchet-trajectory"] == first.headers["x-ratchet-trajectory"]
    proxy.settled()
    strange = proxy.store.calls.page(trajectory=more.headers["x-ratchet-trajectory"])
    assert [(one.alias, one.parent_call, one.linked_by) for one in strange] == [("support", None, "root")]


def test_a_retry_continues_only_the_attempt_of_its_own_agent(proxy: Proxy, vllm: ScriptedVllm) -> None:
    vllm.failures_left = 1
    failed = call(proxy, "mail")
    assert failed.status_code == 503
    other_agent = call(proxy, "support")
    retried = call(proxy, "mail")
    assert other_agent.headers["x-ratchet-trajectory"] != failed.headers["x-ratchet-trajectory"]
    assert retried.headers["x-ratchet-trajectory"] == failed.headers["x-ratchet-trajectory"]


def test_a_restarted_proxy_continues_each_agents_trajectories(start: Start, vllm_url: str, store: Store,
                                                              tmp_path: Path) -> None:  # fmt: skip
    folder = tmp_path / "apart"
    with running(vllm_url, store, folder, **several()) as proxy:
        before = {agent: call(proxy, agent, messages=SAY).headers["x-ratchet-trajectory"] for agent in AGENTS}
    follow = [*SAY, {"role": "assistant", "content": "yes"}, USER]
    with running(vllm_url, store, folder, **several()) as proxy:
        for agent in AGENTS:
            answer = call(proxy, agent, messages=follow)
            assert answer.headers["x-ratchet-trajectory"] == before[agent]


def test_a_rollout_may_call_another_agent_which_is_not_trained_on_it(
    proxy: Proxy, store: Store, vllm: ScriptedVllm
) -> None:
    tuning = store.tunings.begin("weights", "mail", {})
    name = plan(store, tuning.id, model="mail@0", purpose="live")
    path = f"/t/{name}/v1/chat/completions"
    helper = call(proxy, "support", path)
    own = call(proxy, "mail", path)
    unknown = call(proxy, "gpt-4o", path)
    assert (helper.headers["x-ratchet-trajectory"], helper.headers["x-ratchet-policy"]) == (
        f"{name}~support", "support@0")  # fmt: skip
    assert {one.headers["x-ratchet-trajectory"] for one in (own, unknown)} == {name}
    proxy.settled()
    runs = {run.id: (run.alias, run.purpose) for run in store.trajectories.page()}
    assert runs == {name: ("mail", "live"), f"{name}~support": ("support", "eval")}


# --- the base model ----------------------------------------------------------------------------------------------

QUICK: dict[str, Any] = {"probe_interval_seconds": 0.05, "breaker_reset_seconds": 0.05}


def test_one_agent_of_another_base_model_stops_no_other_agent(store: Store, tmp_path: Path) -> None:
    with served(other()) as url, running(url, store, tmp_path / "a", model="code", **QUICK):
        eventually(lambda: (known := store.base_models.base_model_of("code")) and known.server_fingerprint)
    with served(ScriptedVllm()) as url, running(url, store, tmp_path / "b", model="mail", **QUICK):
        eventually(lambda: (known := store.base_models.base_model_of("mail")) and known.server_fingerprint)
    with served(ScriptedVllm()) as url, running(url, store, tmp_path / "c", **several(**QUICK)) as proxy:
        eventually(lambda: "base_model:code" in alarms(store))
        eventually(lambda: (known := store.base_models.base_model_of("support")) and known.server_fingerprint)
        assert proxy.http.get("/health/ready").status_code == 200
        assert "base_model:mail" not in alarms(store)
        assert call(proxy, "mail").status_code == 200


def test_a_new_agent_takes_the_base_model_of_the_others(store: Store, tmp_path: Path) -> None:
    with served(ScriptedVllm()) as right, served(other()) as wrong:
        with running(right, store, tmp_path / "a", model="mail", **QUICK):
            base = eventually(lambda: (known := store.base_models.base_model_of("mail")) and known.server_fingerprint)
        settings: Any = {"model": "", "agents": ("mail", "support"), "upstreams": (wrong, right), **QUICK}
        with running(right, store, tmp_path / "b", **settings) as proxy:
            eventually(lambda: probe_results(proxy) == [False, True])
            known = eventually(lambda: (one := store.base_models.base_model_of("support")) and one.server_fingerprint)
            assert known["root"] == base["root"]


# --- hostile names -----------------------------------------------------------------------------------------------

HOSTILE = ("\N{CYRILLIC SMALL LETTER A}gent", "..", "a%2fb", "'\"<b>", "x~1", "a%41b", "a:b", "a,b;c=d", "constructor",
           "null", "{0}%s", "judge.*", "N" * 100)  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_odd_names_of_agents_are_served_like_plain_ones(start: Start, store: Store, stream: bool) -> None:
    proxy = start(model="", agents=HOSTILE)
    for path in BODIES:
        for agent in HOSTILE:
            answer = call(proxy, agent, path, stream=stream)
            assert answer.status_code == 200, (agent, answer.text)
    for agent in HOSTILE:
        assert call(proxy, agent, "/t/shared/v1/chat/completions", stream=stream).status_code == 200
        assert call(proxy, f"{agent}@0", stream=stream).status_code == 200
    proxy.settled()
    assert Counter(one.alias for one in store.calls.page(1000)) == dict.fromkeys(HOSTILE, len(BODIES) + 2)
    runs = {run.id: run.alias for run in store.trajectories.page(1000)}
    assert all(runs[one.trajectory_id] == one.alias for one in store.calls.page(1000))
    assert len([name for name in runs if name.startswith("shared")]) == len(HOSTILE)
    listed = {card["id"] for card in proxy.http.get("/v1/models").json()["data"]}
    assert listed == {*HOSTILE, *(f"{agent}@0" for agent in HOSTILE)}
    for name in listed - {"..", "..@0"}:  # clients remove the dots themselves
        assert proxy.http.get(f"/v1/models/{quote(name, safe='')}").json()["id"] == name
    assert proxy.http.get("/metrics").status_code == 200
    assert proxy.http.get("/api/overview").status_code == 200


@pytest.fixture
def two_agents(start: Start, store: Store) -> Proxy:
    """A proxy of three agents with a call of two of them, and a group, an alarm and feedback of each."""
    two_agents = start(**several())
    for agent in AGENTS[:2]:
        for path in BODIES:
            assert call(two_agents, agent, path).status_code == 200
    two_agents.settled()
    for agent in AGENTS[:2]:
        names = [run.id for run in store.trajectories.page() if run.alias == agent]
        assert two_agents.http.post("/api/feedback", json={"trajectory_id": names[0], "value": 1}).status_code == 201
        for name in names:
            store.trajectories.seal(name, 1e10)
        store.groups.create(f"task:{agent}", agent, names, now=1e10)
        store.alarms.raise_(f"no_signal:{agent}", "no variance")
    store.alarms.raise_("proxy_journal_lost", "of no agent")
    two_agents.settled()
    eventually(lambda: len(two_agents.http.get("/api/feedback").json()["data"]) == 2)
    return two_agents


def rows(two_agents: Proxy, path: str, **query: Any) -> list[dict[str, Any]]:
    answer = two_agents.http.get(f"/api/{path}", params=query)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["data"]
    return found


@pytest.mark.parametrize(("path", "count"), [("calls", 4), ("trajectories", 4), ("groups", 1), ("policies", 1)])
def test_a_list_of_one_agent_has_its_records_only(two_agents: Proxy, path: str, count: int) -> None:
    for agent in AGENTS[:2]:
        assert [row["alias"] for row in rows(two_agents, path, alias=agent)] == [agent] * count
    assert len(rows(two_agents, path)) == (3 if path == "policies" else 2 * count)
    assert rows(two_agents, path, alias="nobody") == []


def test_feedback_alarms_and_counts_are_those_of_one_agent(two_agents: Proxy, store: Store) -> None:
    runs = {run.id: run.alias for run in store.trajectories.page()}
    assert [runs[row["trajectory_id"]] for row in rows(two_agents, "feedback", alias="mail")] == ["mail"]
    assert {row["name"] for row in rows(two_agents, "alarms", alias="mail")} == {"no_signal:mail", "proxy_journal_lost"}
    assert {row["name"] for row in rows(two_agents, "alarms", alias="code")} == {"proxy_journal_lost"}
    training = two_agents.http.get("/api/training", params={"alias": "mail"}).json()
    assert (training["trajectories"]["grouped"], training["trajectories"]["open"]) == (4, 0)
    overview = two_agents.http.get("/api/overview", params={"alias": "mail"}).json()
    assert [one["alias"] for one in overview["aliases"]] == ["mail"]
    assert overview["trajectories"]["grouped"] == 4
    assert len(two_agents.http.get("/api/overview").json()["aliases"]) == 3


def test_agents_are_listed_with_their_state(two_agents: Proxy, store: Store) -> None:
    store.policies.register_base("former", "tiny-base")
    states = {row["agent"]: (row["state"], row["live_version"]) for row in rows(two_agents, "agents")}
    assert states == dict.fromkeys(AGENTS, ("serving", 0)) | {"former": ("not_served", 0)}


def test_usage_is_counted_by_agent_and_key(start: Start, store: Store) -> None:
    one, first = made(store, agents=("mail",))
    two, second = made(store)
    boss, _ = made(store, KeyScope.OPERATOR)
    two_agents = start(**several())
    for key, agent in ((one, "mail"), (two, "mail"), (two, "support"), (two, "support")):
        assert call(two_agents, agent, key=key).status_code == 200
    two_agents.settled()
    answer = two_agents.http.get("/api/usage", headers=bearer(boss)).json()["data"]
    calls = {(row["alias"], row["key_id"], row["purpose"]): row["calls"] for row in answer}
    assert calls == {("mail", first.id, "live"): 1, ("mail", second.id, "live"): 1, ("support", second.id, "live"): 2}
    stored = store.calls.page()
    assert sum(row["prompt_tokens"] for row in answer) == sum(one.prompt_tokens for one in stored) > 0
    only = two_agents.http.get("/api/usage", params={"alias": "support"}, headers=bearer(boss)).json()["data"]
    assert [row["alias"] for row in only] == ["support"]
    listed = two_agents.http.get("/api/keys", headers=bearer(boss)).json()["data"]
    assert [row["agents"] for row in listed] == [["mail"], None, None]
    assert not any("hash" in row for row in listed)
    assert two_agents.http.get("/api/keys", headers=bearer(one)).status_code == 403


def test_metrics_are_counted_by_agent(two_agents: Proxy) -> None:
    for name in ("ratchet_calls_total", "ratchet_links_total"):
        assert [value(two_agents, name, alias=agent) for agent in AGENTS] == [4, 4, 0]
    assert value(two_agents, "ratchet_tokens_total", alias="mail") == value(
        two_agents, "ratchet_tokens_total", alias="support"
    )
    assert value(two_agents, "ratchet_context_tokens_total", alias="mail") > 0
    call(two_agents, "no-agent-of-ours")
    assert "no-agent-of-ours" not in two_agents.http.get("/metrics").text, "clients add no label"
