"""/v1/completions: text in, text out, recorded with the engine's tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ratchet.store.records import Call, unpack_ids, unpack_logprobs
from ratchet.store.states import CallState
from tests.harness.proxy.running_proxy import Proxy
from tests.harness.proxy.scripted_vllm import END, ScriptedVllm, logprob


def last_call(proxy: Proxy) -> Call:
    proxy.settled()
    return proxy.store.calls.page(1)[0]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("as_ids", [False, True])
def test_a_completion_is_answered_and_recorded(proxy: Proxy, streamed: bool, as_ids: bool) -> None:
    text = "once #say=upon.a.time"
    prompt: Any = list(text.encode()) if as_ids else text
    if streamed:
        stream = proxy.agent(strict=False).completions.create(model="agent", prompt=prompt, stream=True)
        texts = [chunk.choices[0].text for chunk in stream]
        assert "".join(texts) == "upon a time"
    else:
        answer = proxy.agent().completions.create(model="agent", prompt=prompt, temperature=0.5)
        assert (answer.choices[0].text, answer.model, answer.choices[0].logprobs) == ("upon a time", "agent@0", None)
    call = last_call(proxy)
    assert (call.dialect, call.state, call.linked_by, call.untrainable) == (
        "completions",
        CallState.ANSWERED,
        "root",
        None,
    )
    assert unpack_ids(call.prompt_ids) == tuple(text.encode())
    assert unpack_ids(call.choices[0].token_ids) == (*b"upon a time", END)
    assert unpack_logprobs(call.choices[0].logprobs) == pytest.approx([logprob(k) for k in range(12)])
    found = proxy.store.trajectories.read(call.trajectory_id)
    assert list(found.messages) == [
        {"role": "prompt", "content": prompt},
        {"role": "assistant", "content": "upon a time"},
    ]


@pytest.mark.parametrize("streamed", [False, True])
def test_every_choice_of_n_is_recorded(proxy: Proxy, streamed: bool) -> None:
    body = {"model": "agent", "prompt": "hi", "n": 3, "stream": streamed}
    assert proxy.http.post("/v1/completions", json=body).status_code == 200
    call = last_call(proxy)
    assert len({choice.token_ids for choice in call.choices}) == 3
    assert call.untrainable is None


def test_the_client_gets_the_fields_that_it_requested_and_no_others(proxy: Proxy) -> None:
    body = {"model": "agent", "prompt": "#say=hi"}
    plain = proxy.http.post("/v1/completions", json=body).json()["choices"][0]
    assert (plain["token_ids"], plain["prompt_token_ids"]) == (None, None)
    options = {"logprobs": 1, "return_token_ids": True}
    full = proxy.http.post("/v1/completions", json=body | options).json()["choices"][0]
    assert (full["token_ids"], full["prompt_token_ids"]) == ([*b"hi", END], list(b"#say=hi"))
    assert len(full["logprobs"]["token_logprobs"]) == 3
    streamed = proxy.http.post("/v1/completions", json=body | {"stream": True}).text
    assert "usage" not in streamed
    assert streamed.count('token_ids":') == streamed.count('token_ids":null') > 0
    events = [json.loads(line[6:]) for line in streamed.split("\n\n")[:-2]]
    assert [event["choices"][0]["text"] for event in events] == ["h", "i", ""]


def test_equal_prompts_are_separate_runs_and_nothing_continues_them(proxy: Proxy) -> None:
    for _ in range(2):
        proxy.agent().completions.create(model="agent", prompt="#say=same")
    history: Any = [{"role": "assistant", "content": "same"}, {"role": "user", "content": "hi"}]
    proxy.agent().chat.completions.create(model="agent", messages=history)
    proxy.settled()
    calls = proxy.store.calls.page(3)
    assert len({call.trajectory_id for call in calls}) == 3
    assert {call.linked_by for call in calls} == {"root"}
    assert len({proxy.store.trajectories.get(call.trajectory_id).group_key for call in calls}) == 2


def test_a_text_that_contains_an_earlier_answer_continues_it(proxy: Proxy) -> None:
    text = "Question: where? Thought: #say=I.look.for.the.budget.in.the.mail.of.March"
    for _ in range(3):
        answer = proxy.agent().completions.create(model="agent", prompt=text).choices[0].text
        text += f"{answer}\nObservation: none. Thought: #say=It.is.not.there;.I.look.in.the.next.{len(text)}"
    proxy.settled()
    calls = proxy.store.calls.page(3)[::-1]
    assert len({call.trajectory_id for call in calls}) == 1
    assert [call.linked_by for call in calls] == ["root", "graph", "graph"]
    assert [call.parent_call for call in calls] == [None, calls[0].id, calls[1].id]


def test_bad_requests_get_an_error_that_names_the_fault(proxy: Proxy) -> None:
    for body, says in (({"model": "agent"}, "prompt"), ({"model": 5, "prompt": "x"}, "model")):
        answer = proxy.http.post("/v1/completions", json=body)
        assert answer.status_code == 400
        assert says in answer.json()["error"]["message"]


@pytest.mark.parametrize("fields", [{}, {"logprobs": 2}, {"stream": True}])
def test_requests_with_echo_reach_vllm_unchanged(proxy: Proxy, vllm: ScriptedVllm, fields: dict[str, Any]) -> None:
    """vLLM omits the echo if token ids are requested, and adds `prompt_logprobs` if logprobs are requested."""
    body = {"model": "agent", "prompt": "#say=on", "echo": True, **fields}
    assert proxy.http.post("/v1/completions", json=body).status_code == 200
    sent = {name: given for name, given in vllm.calls[-1].items() if name in ("return_token_ids", "logprobs")}
    assert sent == ({"logprobs": 2} if "logprobs" in fields else {})
    assert last_call(proxy).untrainable == "echo"
