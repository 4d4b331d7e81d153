"""A version's prompt replaces the agent's in every dialect; the client and the records keep the agent's."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ratchet.store.content.messages import with_prompt
from ratchet.store.operation_records import Rollout
from ratchet.store.records import Policy, unpack_ids
from ratchet.store.store import Store
from tests.harness.proxy.running_proxy import Proxy, running
from tests.harness.proxy.scripted_scale_out import ScriptedScaleOut
from tests.harness.proxy.scripted_vllm import ScriptedVllm, render
from tests.harness.proxy.servers import eventually, served
from tests.harness.records import commit_round

PROMPT = "Answer in rhymes."
USER: dict[str, Any] = {"role": "user", "content": "hi #say=hello"}
OWN: dict[str, Any] = {"role": "system", "content": "Be nice."}
WHOLE_OR_STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])


def give(proxy: Proxy, text: str = PROMPT, mode: str = "replace", **families: str) -> Policy:
    """Make a version with a prompt live; wait until the proxy serves it."""
    prompt = proxy.store.prompts.register(text, mode, families={k.replace("_", ":"): v for k, v in families.items()})
    made = proxy.store.policies.register_prompt_version("agent", prompt.id, {})
    proxy.store.policies.promote("agent", made.version, {})
    known(proxy, made.version)
    return made


def known(proxy: Proxy, version: int) -> None:
    eventually(
        lambda: any(
            d.live_versions.get("agent") == version
            for d in proxy.store.proxy_instances.running("agent", time.time() - 2)
        )
    )


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/chat/completions", {"messages": [OWN, USER]}),
    "developer": ("/chat/completions", {"messages": [OWN | {"role": "developer"}, USER]}),
    "none": ("/chat/completions", {"messages": [USER]}),
    "responses": ("/responses", {"instructions": OWN["content"], "input": USER["content"]}),
    "messages": ("/messages", {"system": OWN["content"], "messages": [USER], "max_tokens": 50}),
}


@WHOLE_OR_STREAMED
@pytest.mark.parametrize("name", BODIES)
def test_a_prompt_replaces_the_agents_own_and_appears_in_no_record(
    proxy: Proxy, vllm: ScriptedVllm, name: str, streamed: bool
) -> None:
    give(proxy)
    path, body = BODIES[name]
    answer = proxy.http.post(f"/v1{path}", json={"model": "agent", "stream": streamed, **body})
    assert answer.status_code == 200
    assert PROMPT not in answer.text
    assert answer.headers["x-ratchet-policy"] == "agent@1"
    sent = vllm.calls[-1]
    assert sent["messages"] == [{"role": "system", "content": PROMPT}, USER]
    assert sent["model"] == vllm.base
    proxy.settled()
    (call,) = proxy.store.calls.page()
    read = proxy.store.trajectories.read(call.trajectory_id)
    recorded = [(message["role"], message["content"]) for message in read.messages]
    own = [] if name == "none" else [("developer" if name == "developer" else "system", OWN["content"])]
    assert recorded == [*own, ("user", USER["content"]), ("assistant", "hello")]
    assert list(unpack_ids(call.prompt_ids)) == render(sent["messages"])
    assert call.untrainable is None


@pytest.mark.slow
def test_a_candidate_with_the_live_prompt_never_serves_without_it(proxy: Proxy, vllm: ScriptedVllm) -> None:
    policies, rounds = proxy.store.policies, proxy.store.rounds
    policies.register_prompt_version("agent", proxy.store.prompts.register(PROMPT).id, {})
    learnt = rounds.start("agent", 0)
    rounds.commit(learnt.id, version=2, checkpoint="/adapters/2", groups=[], metrics={})
    eventually(lambda: '"agent@2"' in proxy.http.get("/v1/models").text)
    policies.promote("agent", 1, {}, by="me", reason="by hand")
    policies.adopt_prompt("agent", 2)
    policies.promote("agent", 2, {})
    body = {"model": "agent", "messages": [USER]}
    eventually(lambda: proxy.http.post("/v1/chat/completions", json=body).headers["x-ratchet-policy"] == "agent@2")
    assert vllm.calls[-1]["messages"][0] == {"role": "system", "content": PROMPT}


def test_responses_echo_the_agents_own_instructions_and_continue_an_earlier_one(
    proxy: Proxy, vllm: ScriptedVllm
) -> None:
    give(proxy)
    agent = proxy.agent()
    first = agent.responses.create(model="agent", instructions="Be nice.", input="one")
    assert first.instructions == "Be nice."
    second = agent.responses.create(model="agent", instructions="Be nicer.", input="two", previous_response_id=first.id)
    third = agent.responses.create(model="agent", input="three", previous_response_id=second.id)
    assert (second.instructions, third.instructions) == ("Be nicer.", None)
    for call in vllm.calls:
        assert call["messages"][0] == {"role": "system", "content": PROMPT}
    assert [message["content"] for message in vllm.calls[-1]["messages"][1::2]] == ["one", "two", "three"]
    proxy.settled()
    calls = sorted(proxy.store.calls.page(), key=lambda call: call.started_at)
    assert [call.context for call in calls] == ["root", "exact", "exact"]


@pytest.mark.parametrize(
    ("own", "sent"),
    [
        ("Be nice.", f"Be nice.\n\n{PROMPT}"),
        (
            [{"type": "text", "text": "Be nice."}],
            [{"type": "text", "text": "Be nice."}, {"type": "text", "text": PROMPT}],
        ),
        (None, PROMPT),
    ],
    ids=["text", "parts", "none"],
)
def test_an_appended_prompt_follows_the_agents_own(proxy: Proxy, vllm: ScriptedVllm, own: Any, sent: Any) -> None:
    give(proxy, mode="append")
    messages = [{"role": "system", "content": own}, USER] if own else [USER]
    assert proxy.http.post("/v1/chat/completions", json={"model": "agent", "messages": messages}).status_code == 200
    assert vllm.calls[-1]["messages"] == [{"role": "system", "content": sent}, USER]


def test_only_a_first_system_message_is_replaced(proxy: Proxy, vllm: ScriptedVllm) -> None:
    give(proxy)
    second = {"role": "system", "content": "Today is Friday."}
    raw = '{"model":"agent","messages":[{"role":"system","content":"x"},%s,{"role":"user","content":"a","x":1.50}]}'
    proxy.http.post(
        "/v1/chat/completions", content=raw % json.dumps(second), headers={"content-type": "application/json"}
    )
    assert vllm.calls[-1]["messages"] == [
        {"role": "system", "content": f"{PROMPT}\n\n{second['content']}"}, {"role": "user", "content": "a", "x": 1.5},
    ]  # fmt: skip


def test_text_completions_have_no_system_prompt(proxy: Proxy, vllm: ScriptedVllm) -> None:
    give(proxy)
    answer = proxy.http.post("/v1/completions", json={"model": "agent", "prompt": "Once"})
    assert answer.status_code == 200
    assert vllm.calls[-1]["prompt"] == "Once"


def test_operators_read_a_versions_prompt(proxy: Proxy) -> None:
    made = give(proxy)
    answer = proxy.http.get(f"/api/policies/{made.version}/prompt", params={"alias": "agent"}).json()
    assert (answer["prompt"]["id"], answer["prompt"]["text"]) == (made.prompt_id, PROMPT)
    assert proxy.http.get("/api/policies/0/prompt", params={"alias": "agent"}).json() == {"prompt": None}
    assert proxy.http.get("/api/policies/9/prompt", params={"alias": "agent"}).status_code == 404


@pytest.mark.slow
def test_tokens_are_counted_with_the_prompt(proxy: Proxy) -> None:
    body = {"model": "agent", "messages": [USER], "system": "Be nice."}

    def count() -> int:
        return int(proxy.http.post("/v1/messages/count_tokens", json=body).json()["input_tokens"])

    before = count()
    give(proxy)
    assert count() - before == len(PROMPT) - len("Be nice.")


def test_tokens_are_counted_with_the_prompt_of_the_rollout_and_of_the_family(proxy: Proxy) -> None:
    body = {"model": "agent", "messages": [USER], "system": "Be nice."}

    def count(path: str = "", **headers: str) -> int:
        answer = proxy.http.post(f"{path}/v1/messages/count_tokens", json=body, headers=headers)
        return int(answer.json()["input_tokens"])

    plain = count()
    prompt = proxy.store.prompts.register("A prompt on trial.")
    tuning = proxy.store.tunings.begin("prompt", "agent", {}).id
    planned = Rollout(id="roll_1", tuning_id=tuning, task_id="mail/7", split="train", attempt=0, candidate=prompt.id,
                      planned_at=1.0, prompt_id=prompt.id, purpose="eval")  # fmt: skip
    proxy.store.rollouts.plan([planned])
    longer = len(prompt.text) - len("Be nice.")
    assert count("/t/roll_1") - plain == longer
    assert count(**{"x-ratchet-trajectory": "roll_1"}) - plain == longer
    assert count("/t/other") == plain
    give(proxy, "For all.", task_mail="For the family of mail.")
    assert count() - plain == len("For all.") - len("Be nice.")
    assert count(**{"x-ratchet-task": "mail/9"}) - plain == len("For the family of mail.") - len("Be nice.")
    assert count("/t/roll_1") - plain == longer


@pytest.mark.slow
def test_a_trajectory_keeps_its_first_prompt(proxy: Proxy, vllm: ScriptedVllm) -> None:
    def say(name: str, model: str = "agent") -> tuple[str, Any]:
        answer = proxy.http.post(f"/t/{name}/v1/chat/completions", json={"model": model, "messages": [USER]})
        assert answer.status_code == 200, answer.text
        return answer.headers["x-ratchet-policy"], vllm.calls[-1]["messages"][0]["content"]

    assert say("old") == ("agent@0", USER["content"])
    give(proxy, "First.")
    assert say("one") == ("agent@1", "First.")
    promote_adapter(proxy, 2)
    assert say("two") == ("agent@2", "First.")  # the new adapter serves with the live prompt
    give(proxy, "Second.")
    assert (say("three"), vllm.calls[-1]["model"]) == (("agent@3", "Second."), "agent@2")
    proxy.store.policies.roll_back("agent", 0, {}, by="me", reason="r")
    known(proxy, 0)
    assert say("new") == ("agent@0", USER["content"])
    eventually(lambda: proxy.http.get("/v1/models/agent@3").status_code == 404)
    assert say("one") == ("agent@1", "First.")  # also on versions that are rejected now
    assert (say("three"), vllm.calls[-1]["model"]) == (("agent@3", "Second."), "agent@2")
    assert vllm.loads == ["agent@2"]


def promote_adapter(proxy: Proxy, version: int) -> None:
    """Train and promote a version, as the trainer does."""
    commit_round(proxy.store, "agent", version, base=0, checkpoint=f"/adapters/{version}")
    proxy.store.policies.promote("agent", version, {})
    known(proxy, version)


def test_a_version_with_a_prompt_can_be_in_its_ramp_and_be_requested_by_name(proxy: Proxy, vllm: ScriptedVllm) -> None:
    prompt = proxy.store.prompts.register(PROMPT)
    made = proxy.store.policies.register_prompt_version("agent", prompt.id, {})
    proxy.store.policies.start_ramp("agent", made.version, 0.5)
    eventually(lambda: 'ratchet_version_share_ratio{alias="agent",role="ramp"} 0.5' in proxy.http.get("/metrics").text)
    seen: dict[str, set[str]] = {}
    for number in range(40):
        body = {"model": "agent", "messages": [USER]}
        answer = proxy.http.post(f"/t/a{number}/v1/chat/completions", json=body)
        first = vllm.calls[-1]["messages"][0]["content"]
        seen.setdefault(answer.headers["x-ratchet-policy"], set()).add(first)
    assert seen == {"agent@0": {USER["content"]}, "agent@1": {PROMPT}}
    named = proxy.http.post("/v1/chat/completions", json={"model": "agent@1", "messages": [USER]})
    assert named.headers["x-ratchet-policy"] == "agent@1"
    assert vllm.calls[-1]["messages"][0]["content"] == PROMPT


def test_texts_are_chosen_by_the_trajectorys_family_also_after_a_restart(
    vllm_url: str, vllm: ScriptedVllm, store: Store, tmp_path: Path
) -> None:
    def say(proxy: Proxy, messages: list[Any], task: str = "") -> dict[str, Any]:
        headers = {"x-ratchet-task": task} if task else {}
        answer = proxy.http.post("/v1/chat/completions", json={"model": "agent", "messages": messages}, headers=headers)
        return {key: value for key, value in answer.json()["choices"][0]["message"].items() if value}

    with running(vllm_url, store, tmp_path) as proxy:
        give(proxy, "For all.", "append", task_math="Check the units.", task_mail="")
        math = [OWN, USER, say(proxy, [OWN, USER], "math/17")]
        say(proxy, [*math, USER])  # only the first call named its task
        for task in ("mail/1", "other/1", ""):
            say(proxy, [OWN, {"role": "user", "content": f"another #say=of-{task}."}], task)
        proxy.settled()
    with running(vllm_url, store, tmp_path) as proxy:
        say(proxy, [*math, {"role": "user", "content": "after the restart"}])
        proxy.settled()
    sent = [call["messages"][0]["content"] for call in vllm.calls]
    units = "Be nice.\n\nCheck the units."
    assert sent == [units, units, "Be nice.", *["Be nice.\n\nFor all."] * 2, units]
    assert len(store.trajectories.page()) == 4
    assert [call.context for call in sorted(store.calls.page(), key=lambda c: c.started_at)][1] == "exact"


@pytest.fixture
def scale_out() -> ScriptedScaleOut:
    return ScriptedScaleOut()


@WHOLE_OR_STREAMED
@pytest.mark.parametrize("own", [True, False], ids=["own_prompt", "no_prompt"])
def test_continuations_under_a_prompt_are_spliced(
    scale_out: ScriptedScaleOut, store: Store, tmp_path: Path, streamed: bool, own: bool
) -> None:
    with served(scale_out) as url, running(url, store, tmp_path) as proxy:
        give(proxy)
        agent = proxy.agent()
        messages: list[Any] = [*([OWN] if own else []), {"role": "user", "content": "#think=hm #tool=search #drift"}]
        for text in ("#think=so #tool=search #drift", "#say=the.end"):
            message = _ask(agent, messages, streamed)
            calls = [
                {"id": call["id"], "type": "function", "function": call["function"]} for call in message["tool_calls"]
            ]
            messages += [{"role": "assistant", "tool_calls": calls}]
            messages += [{"role": "tool", "tool_call_id": calls[0]["id"], "content": text}]
        assert _ask(agent, messages, streamed)["content"] == "the end"
        proxy.settled()
        calls_made = sorted(store.calls.page(), key=lambda call: call.started_at)
        assert [call.context for call in calls_made] == ["root", "exact", "exact"]
        metrics = proxy.http.get("/metrics").text
        assert 'ratchet_exact_splices_total{outcome="spliced"} 2.0' in metrics
        assert bytes(i % 256 for i in unpack_ids(calls_made[0].prompt_ids)).count(PROMPT.encode()) == 1


def _ask(agent: Any, messages: list[Any], streamed: bool) -> Any:
    if not streamed:
        answer = agent.chat.completions.create(model="agent", messages=messages)
        return answer.choices[0].message.model_dump(exclude_none=True)
    with agent.chat.completions.stream(model="agent", messages=messages) as stream:
        return stream.get_final_completion().choices[0].message.model_dump(exclude_none=True, exclude={"parsed"})


def test_a_prompt_without_a_text_for_the_family_changes_nothing(store: Store) -> None:
    prompt = store.prompts.register("", "append", families={"task:math": "Check the units."})
    messages: list[Mapping[str, Any]] = [OWN, USER]
    assert with_prompt(messages, prompt, "task:mail") == with_prompt(messages, None, "task:math") == (OWN, USER)
    assert with_prompt([], prompt, "task:math") == ({"role": "system", "content": "Check the units."},)
    assert messages == [OWN, USER]
