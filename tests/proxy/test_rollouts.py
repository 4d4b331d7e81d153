"""Rollouts: calls under `/t/roll_.../v1` are served as the tuner planned them; other calls are unchanged."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from ratchet.proxy.coordinator.rollouts.rollout_plans import RolloutPlans
from ratchet.store.db.engine import connect
from ratchet.store.errors import RecordNotFound
from ratchet.store.ids import new_id
from ratchet.store.operation_records import Rollout
from ratchet.store.store import Store
from tests.harness.proxy.running_proxy import Proxy, Start
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import eventually, served
from tests.proxy.test_keys import bearer, made
from tests.proxy.test_other_models import PlainServer, entry
from tests.proxy.test_policy import candidate, promote
from tests.proxy.test_prompts import give

USER: dict[str, Any] = {"role": "user", "content": "hi"}
BODY: dict[str, Any] = {"model": "agent", "messages": [{"role": "system", "content": "Mine."}, USER]}


def plan(store: Store, tuning: str = "", **changes: Any) -> str:
    """Plan a rollout as the tuner does; return its id."""
    tuning = tuning or store.tunings.begin("prompt", "agent", {}).id
    values: dict[str, Any] = {"task_id": "mail/7", "split": "train", "attempt": 0, "candidate": "c", "planned_at": 1.0}
    rollout = Rollout(id=new_id("roll"), tuning_id=tuning, **(values | changes))
    store.rollouts.plan([rollout])
    return rollout.id


def post(
    proxy: Proxy,
    name: str,
    body: dict[str, Any] = BODY,
    path: str = "/chat/completions",
    headers: dict[str, str] | None = None,
) -> Any:
    return proxy.http.post(f"/t/{name}/v1{path}", json=body, headers=headers)


def test_a_rollout_is_served_with_its_task_its_purpose_and_its_prompt(proxy: Proxy, vllm: ScriptedVllm) -> None:
    prompt = proxy.store.prompts.register("Candidate 7.")
    name = plan(proxy.store, prompt_id=prompt.id, purpose="eval")
    answer = post(proxy, name, headers={"x-ratchet-task": "the agent's own"})
    assert answer.status_code == 200
    assert answer.headers["x-ratchet-trajectory"] == name
    assert vllm.calls[-1]["messages"][0]["content"] == "Candidate 7."
    assert "Candidate 7." not in answer.text
    proxy.settled()
    run = proxy.store.trajectories.get(name)
    assert (run.task, run.purpose, run.version) == ("mail/7", "eval", 0)
    assert proxy.store.trajectories.read(name).messages[0]["content"] == "Mine."


def test_calls_that_do_not_name_the_rollout_are_linked_to_it(proxy: Proxy, vllm: ScriptedVllm) -> None:
    prompt = proxy.store.prompts.register("Candidate 7.")
    name = plan(proxy.store, prompt_id=prompt.id)
    first = post(proxy, name).json()["choices"][0]["message"]
    reply = {"role": "assistant", "content": first["content"]}
    again = proxy.http.post("/v1/chat/completions", json=BODY | {"messages": [*BODY["messages"], reply, USER]})
    assert again.headers["x-ratchet-trajectory"] == name
    assert vllm.calls[-1]["messages"][0]["content"] == "Candidate 7."


def test_a_rollouts_model_replaces_the_one_that_the_agent_requests(proxy: Proxy, vllm: ScriptedVllm) -> None:
    promote(proxy, 1)
    request = BODY | {"model": "gpt-of-the-agent"}
    for model, policy in (("agent", "agent@1"), ("agent@0", "agent@0"), ("agent@1", "agent@1")):
        name = plan(proxy.store, model=model)
        answer = post(proxy, name, request)
        assert (answer.status_code, answer.headers["x-ratchet-policy"]) == (200, policy)
        assert answer.json()["model"] == policy
        proxy.settled()
        assert proxy.store.trajectories.get(name).purpose == "live"
    unknown = post(proxy, plan(proxy.store, model="agent@9"), request)
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert post(proxy, plan(proxy.store), request).status_code == 404


def test_a_rollout_on_another_model_is_the_trajectory_itself(start: Start, vllm: ScriptedVllm) -> None:
    app = PlainServer()
    with served(app) as url:
        proxy = start(model_list=[entry(url)], model_keys={"K": "sk-judge-0123456789"})
        prompt = proxy.store.prompts.register("Candidate 7.")
        name = plan(proxy.store, model="judge", prompt_id=prompt.id, purpose="eval")
        answer = post(proxy, name)
        assert (answer.status_code, answer.headers["x-ratchet-trajectory"]) == (200, name)
        assert app.bodies[-1]["messages"] == [{"role": "system", "content": "Candidate 7."}, USER]
        proxy.settled()
        run = proxy.store.trajectories.get(name)
        assert (run.alias, run.purpose, run.task) == ("judge", "other_model", "mail/7")
    assert vllm.calls == []


@pytest.mark.parametrize("pinned", [None, "agent@0", "agent", "candidate"])
def test_a_rollout_reaches_its_helper_model_whatever_model_is_planned(
    start: Start, vllm: ScriptedVllm, pinned: str | None
) -> None:
    helper, other = PlainServer(), PlainServer()
    with served(helper) as url, served(other) as elsewhere:
        models = [entry(url), entry(elsewhere, name="candidate")]
        proxy = start(model_list=models, model_keys={"K": "sk-judge-0123456789"})
        prompt = proxy.store.prompts.register("Candidate 7.")
        name = plan(proxy.store, model=pinned, prompt_id=prompt.id, purpose="eval")
        main, helped = post(proxy, name), post(proxy, name, BODY | {"model": "judge"})
        assert (main.status_code, helped.status_code) == (200, 200)
        own = other.bodies if pinned == "candidate" else vllm.calls
        assert [body["messages"][0]["content"] for body in own] == ["Candidate 7."]
        assert [body["messages"] for body in helper.bodies] == [BODY["messages"]]
        proxy.settled()
        read = proxy.store.trajectories
        assert [call.alias for call in read.read(name).calls] == ["candidate" if pinned == "candidate" else "agent"]
        assert (read.get(f"{name}~judge").alias, read.get(f"{name}~judge").purpose) == ("judge", "other_model")


def test_evaluations_start_on_the_live_version_and_training_rollouts_may_start_on_a_ramp(proxy: Proxy) -> None:
    candidate(proxy, 1)
    proxy.store.policies.start_ramp("agent", 1, 0.999)
    eventually(
        lambda: 'ratchet_version_share_ratio{alias="agent",role="ramp"} 0.999' in proxy.http.get("/metrics").text
    )
    prompt = proxy.store.prompts.register("Candidate 7.")
    answers = [post(proxy, plan(proxy.store, **more)) for more in ({}, {"purpose": "eval"}, {"prompt_id": prompt.id})]
    assert [answer.headers["x-ratchet-policy"] for answer in answers] == ["agent@1", "agent@0", "agent@0"]


def test_a_rollouts_prompt_overrides_its_versions_prompt(proxy: Proxy, vllm: ScriptedVllm) -> None:
    give(proxy, "The version's.")
    prompt = proxy.store.prompts.register("Candidate 7.")
    for name, sent in ((plan(proxy.store, prompt_id=prompt.id), "Candidate 7."), (plan(proxy.store), "The version's.")):
        post(proxy, name)
        assert vllm.calls[-1]["messages"][0]["content"] == sent


def test_an_unplanned_id_is_an_ordinary_trajectory(proxy: Proxy, vllm: ScriptedVllm) -> None:
    answer = post(proxy, "roll_of_somebody", headers={"x-ratchet-task": "own"})
    assert answer.headers["x-ratchet-trajectory"] == "roll_of_somebody"
    assert vllm.calls[-1]["messages"] == BODY["messages"]
    proxy.settled()
    assert proxy.store.trajectories.get("roll_of_somebody").task == "own"


def test_another_keys_rollout_is_not_served(start: Start, store: Store, vllm: ScriptedVllm) -> None:
    (one, first), (two, _) = made(store), made(store)
    prompt = store.prompts.register("Candidate 7.")
    proxy = start()
    kept, taken = plan(store, prompt_id=prompt.id, key_id=first.id), plan(store, prompt_id=prompt.id)
    assert post(proxy, kept, headers=bearer(two)).status_code == 200
    assert vllm.calls[-1]["messages"] == BODY["messages"]
    assert post(proxy, kept, headers=bearer(one)).headers["x-ratchet-trajectory"] == kept + _suffix(kept, proxy)
    for key, sent in ((two, "Candidate 7."), (one, "Mine."), (two, "Candidate 7.")):
        post(proxy, taken, headers=bearer(key))
        assert vllm.calls[-1]["messages"][0]["content"] == sent


def _suffix(name: str, proxy: Proxy) -> str:
    """Return the suffix of a trajectory whose name another key already uses."""
    proxy.settled()
    return next(run.id.removeprefix(name) for run in proxy.store.trajectories.page() if run.id.startswith(name + "~"))


SHAPES = {
    "/chat/completions": BODY,
    "/responses": {"model": "agent", "input": "hi"},
    "/messages": {"model": "agent", "messages": [USER], "max_tokens": 9},
}


@pytest.mark.parametrize("path", SHAPES)
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_while_the_store_is_down_only_new_rollouts_get_503(
    proxy: Proxy, tmp_path: Path, path: str, streamed: bool, vllm: ScriptedVllm
) -> None:
    prompt = proxy.store.prompts.register("Candidate 7.")
    known, new = plan(proxy.store, prompt_id=prompt.id), plan(proxy.store, prompt_id=prompt.id)
    body = SHAPES[path] | {"stream": streamed}
    assert post(proxy, known, body, path).status_code == 200
    engine = connect(str(tmp_path / "store.db"))
    with engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE rollouts RENAME TO gone"))
    calls = len(vllm.calls)
    refused = post(proxy, new, body, path)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    answer = refused.json()
    assert new in answer["error"]["message"]
    assert answer["error"]["type"] == ("overloaded_error" if path == "/messages" else "service_unavailable")
    assert len(vllm.calls) == calls
    assert post(proxy, "ordinary", body, path).status_code == 200
    assert proxy.http.post("/v1" + path, json=body).status_code == 200
    assert post(proxy, known, body, path).status_code == 200
    with engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE gone RENAME TO rollouts"))
    engine.dispose()
    assert post(proxy, new, body, path).status_code == 200
    assert vllm.calls[-1]["messages"][0]["content"] == "Candidate 7."


async def test_memory_is_bounded_and_concurrent_lookups_share_one_query(store: Store) -> None:
    rollouts = RolloutPlans(store, max_ids=10)
    names = [plan(store) for _ in range(15)]
    found = await asyncio.gather(*(rollouts.find_plan(name, None) for name in names for _ in range(3)))
    assert all(one is not None and one.task == "mail/7" for one in found)
    assert sum(rollouts.cached_plan(name, None) is not None for name in names) == 10
    assert await rollouts.find_plan("traj_x", None) is None
    with pytest.raises(RecordNotFound):
        store.rollouts.get("roll_x")
    assert await rollouts.find_plan("roll_x", None) is None
    prompt = store.prompts.register("A long text.").id
    plans = [await rollouts.find_plan(plan(store, prompt_id=prompt), None) for _ in range(3)]
    assert len({id(one.prompt) for one in plans if one is not None}) == 1, "a text is in memory once"
    await rollouts.stop()
