"""/v1/completions, and token ids that are listed on request: text in, text out, recorded with the engine's tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ratchet.proxy.coordinator.operator_api.routes import MAX_TOKENS
from ratchet.store.records import unpack_ids, unpack_logprobs
from ratchet.store.states import CallState
from ratchet.store.store import Store
from tests.harness.proxy.running_proxy import Proxy
from tests.harness.proxy.scripted_vllm import END, ScriptedVllm, logprob
from tests.harness.records import call_start, ended


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
    call = proxy.last_call()
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
    call = proxy.last_call()
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
    assert proxy.last_call().untrainable == "echo"


REPLY = {"role": "assistant", "content": "Oslo"}
LONG = [7] * (MAX_TOKENS // 4)


def shipped(store: Store, count: int, run: str = "", **end: Any) -> list[str]:
    """Ship answered calls of one trajectory, or of one each; return their ids, the newest last."""
    names = [f"call_{place:03d}" for place in range(count)]
    for place, name in enumerate(names):
        parent: dict[str, Any] = {"parent_call": names[place - 1]} if run and place else {}
        start = call_start(name, run or f"t{place}", at=float(place), **parent)
        context = "exact" if parent else "root"
        store.calls.ship([start, ended(start, REPLY, **{"context": context, **end})])
    return names


def has_tokens(call: Any) -> bool:
    """Whether a call in a response has its tokens. Ids and logprobs are both present, or neither."""
    choice = call["choices"][0]
    present = {part is not None for part in (call["prompt_ids"], choice["token_ids"], choice["logprobs"])}
    assert len(present) == 1
    return present.pop()


@pytest.mark.slow
def test_a_list_of_calls_has_no_tokens_unless_requested(proxy: Proxy) -> None:
    shipped(proxy.store, 3)
    bare, whole = (proxy.http.get(f"/api/calls{query}").json()["data"] for query in ("", "?tokens=true"))
    assert [has_tokens(call) for call in bare + whole] == [False] * 3 + [True] * 3
    assert (whole[0]["prompt_ids"], whole[0]["choices"][0]["token_ids"]) == ([1, 2, 3], [4, 5])
    assert [call["completion_tokens"] for call in bare] == [2] * 3


def test_pages_with_many_tokens_are_shorter_and_lead_to_every_call(proxy: Proxy) -> None:
    names = shipped(proxy.store, 10, prompt=LONG)
    seen: list[str] = []
    before: dict[str, str] = {}
    sizes = []
    while True:
        page = proxy.http.get("/api/calls", params={"tokens": True, "limit": 9, **before}).json()
        assert all(map(has_tokens, page["data"]))
        seen += [call["id"] for call in page["data"]]
        sizes.append(len(page["data"]))
        if page["next"] is None:
            break
        before = {"before": page["next"]}
    assert (seen, max(sizes)) == (names[::-1], 3)


def test_one_call_is_listed_whole_however_long_it_is(proxy: Proxy) -> None:
    [name] = shipped(proxy.store, 1, prompt=LONG * 5)
    page = proxy.http.get("/api/calls?tokens=true").json()
    assert [len(call["prompt_ids"]) for call in page["data"]] == [len(LONG) * 5]
    assert len(proxy.http.get(f"/api/calls/{name}").json()["prompt_ids"]) == len(LONG) * 5


def test_a_long_trajectory_lists_the_tokens_of_its_first_calls_only(proxy: Proxy) -> None:
    names = shipped(proxy.store, 6, run="run", prompt=LONG, context="fork")
    found = proxy.http.get("/api/trajectories/run").json()
    assert [has_tokens(call) for call in found["calls"]] == [True] * 3 + [False] * 3
    assert all(has_tokens(proxy.http.get(f"/api/calls/{name}").json()) for name in names)
    assert not any(has_tokens(call) for call in proxy.http.get("/api/trajectories/run?tokens=false").json()["calls"])


def test_exact_turns_count_each_token_once(proxy: Proxy) -> None:
    for place in range(20):
        parent: dict[str, Any] = {"parent_call": f"call_{place - 1:03d}"} if place else {}
        start = call_start(f"call_{place:03d}", "run", at=float(place), **parent)
        context, total = ("exact" if place else "root"), len(LONG) + 10 * place
        end = ended(start, REPLY, prompt=[1] * 8 if place else LONG, context=context, prompt_tokens=total)
        proxy.store.calls.ship([start, end])
    found = proxy.http.get("/api/trajectories/run").json()
    assert all(has_tokens(call) for call in found["calls"])
