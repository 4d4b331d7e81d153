"""/v1/responses under OpenAI's own SDK."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from ratchet.store.records import unpack_ids
from ratchet.store.states import CallState
from ratchet.store.store import Store
from tests.harness.proxy.running_proxy import Proxy, running
from tests.harness.proxy.scripted_vllm import END, ScriptedVllm
from tests.harness.proxy.servers import eventually

TOOLS: Any = [{"type": "function", "name": "search", "parameters": {"type": "object"}, "strict": False}]


def answer_of(agent: openai.OpenAI, streamed: bool, **request: Any) -> Any:
    """The final response, streamed or not."""
    if not streamed:
        return agent.responses.create(model="agent", **request)
    with agent.responses.stream(model="agent", **request) as stream:
        for _ in stream:
            pass
        return stream.get_final_response()


@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_is_rendered_as_items_and_recorded_with_its_ids(
    proxy: Proxy, vllm: ScriptedVllm, streamed: bool
) -> None:
    request: Any = {"input": "#think=let.me.see #say=hello.there", "instructions": "be brief"}
    answer = answer_of(proxy.agent(), streamed, **request, temperature=0.5, max_output_tokens=300)
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.output[0].content[0].text == "let me see"
    assert (answer.output_text, answer.status, answer.model) == ("hello there", "completed", "agent@0")
    call = proxy.last_call()
    assert (call.dialect, call.state, call.untrainable) == ("responses", CallState.ANSWERED, None)
    assert unpack_ids(call.choices[0].token_ids) == (*b"<think>let me see</think>hello there", END)
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (call.prompt_tokens, call.completion_tokens)
    assert (call.sampling["temperature"], call.sampling["max_tokens"]) == (0.5, 300)
    assert [m["role"] for m in vllm.calls[-1]["messages"]] == ["system", "user"]


def test_events_are_numbered_and_one_item_is_open_at_a_time(proxy: Proxy) -> None:
    stream = proxy.agent().responses.create(
        model="agent", input="#think=hm #tool=search+read", tools=TOOLS, stream=True
    )
    events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    turns = [kind for kind in kinds if kind.startswith("response.output_item")]
    assert turns == ["response.output_item.added", "response.output_item.done"] * 3


@pytest.mark.parametrize("streamed", [False, True])
def test_parallel_calls_are_one_turn_and_their_outputs_continue_it(
    proxy: Proxy, vllm: ScriptedVllm, streamed: bool
) -> None:
    agent = proxy.agent()
    answer = answer_of(agent, streamed, input="#think=hm #tool=search+read", tools=TOOLS)
    calls = [item for item in answer.output if item.type == "function_call"]
    assert [(c.name, c.arguments) for c in calls] == [
        ("search", '{"q": "budget", "n": 2}'),
        ("read", '{"q": "budget", "n": 2}'),
    ]
    first = proxy.last_call()
    history: Any = [{"role": "user", "content": "#think=hm #tool=search+read"}]
    history += [item.to_dict() for item in answer.output]
    history += [{"type": "function_call_output", "call_id": c.call_id, "output": "found"} for c in calls]
    agent.responses.create(model="agent", input=[*history, {"role": "user", "content": "#say=done"}], tools=TOOLS)
    second = proxy.last_call()
    assert (second.parent_call, second.linked_by) == (first.id, "graph+tool_ids")
    sent = vllm.calls[-1]["messages"]
    assert [m["role"] for m in sent] == ["user", "assistant", "tool", "tool", "user"]
    assert sent[1]["reasoning"] == "hm"


def test_a_custom_tool_gets_plain_text(proxy: Proxy, vllm: ScriptedVllm) -> None:
    tools: Any = [{"type": "custom", "name": "search"}, {"type": "web_search"}]
    agent = proxy.agent()
    answer: Any = agent.responses.create(model="agent", input="#broken", tools=tools)
    assert (answer.output[0].type, answer.output[0].input) == ("custom_tool_call", "{broken")
    assert [tool["function"]["name"] for tool in vllm.calls[-1]["tools"]] == ["search"]
    item = {"type": "custom_tool_call", "call_id": "c", "name": "search", "input": "words"}
    output = {"type": "custom_tool_call_output", "call_id": "c", "output": "found"}
    history: Any = [{"role": "user", "content": "x"}, item, output]
    agent.responses.create(model="agent", input=history, tools=tools)
    assert vllm.calls[-1]["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"input":"words"}'


@pytest.mark.parametrize("streamed", [False, True])
def test_a_previous_response_is_continued_in_its_trajectory(proxy: Proxy, vllm: ScriptedVllm, streamed: bool) -> None:
    agent = proxy.agent()
    first = answer_of(agent, streamed, input="#say=one", instructions="old")
    answer_of(agent, streamed, input="#say=two", previous_response_id=first.id, instructions="new")
    sent = vllm.calls[-1]["messages"]
    assert [m["content"] for m in sent] == ["new", "#say=one", "one", "#say=two"]
    third = answer_of(agent, streamed, input="#say=three", previous_response_id=first.id)
    assert third.previous_response_id == first.id
    assert [m["content"] for m in vllm.calls[-1]["messages"]] == ["#say=one", "one", "#say=three"]
    proxy.settled()
    calls = proxy.store.calls.page(5)[::-1]
    assert len({call.trajectory_id for call in calls}) == 1
    assert [call.linked_by for call in calls] == ["root", "previous_response", "previous_response"]
    assert [call.parent_call for call in calls] == [None, calls[0].id, calls[0].id]
    assert [call.context for call in calls] == ["root", "fork", "fork"]  # the instructions changed


def test_equal_conversations_are_distinguished_by_the_previous_response(proxy: Proxy) -> None:
    agent = proxy.agent()
    firsts = [agent.responses.create(model="agent", input="#say=one") for _ in range(2)]
    for first in firsts:
        answer = agent.responses.with_raw_response.create(
            model="agent", input="#say=two", previous_response_id=first.id
        )
        proxy.settled()
        first_call = proxy.store.calls.read("call_" + first.id.removeprefix("resp_"))
        assert answer.headers["x-ratchet-trajectory"] == first_call.trajectory_id
        call = proxy.last_call()
        assert (call.parent_call, call.context) == (first_call.id, "exact")


def test_a_previous_response_outlives_a_restart(
    vllm_url: str, vllm: ScriptedVllm, store: Store, tmp_path: Path
) -> None:
    with running(vllm_url, store, tmp_path) as proxy:
        first = proxy.agent().responses.create(model="agent", input="#say=one", instructions="old")
        proxy.settled()
    with running(vllm_url, store, tmp_path) as proxy:
        request: Any = {"model": "agent", "previous_response_id": first.id}
        proxy.agent().responses.create(**request, input="#say=two", instructions="new")
        assert [m["content"] for m in vllm.calls[-1]["messages"]] == ["new", "#say=one", "one", "#say=two"]
        proxy.settled()
        assert proxy.last_call().parent_call == "call_" + first.id.removeprefix("resp_")
        with pytest.raises(openai.NotFoundError):
            proxy.agent(key="another").responses.create(**request, input="hi")


@pytest.mark.slow
def test_a_previous_response_of_another_proxy_is_found_at_once(
    vllm_url: str, vllm: ScriptedVllm, store: Store, tmp_path: Path
) -> None:
    with (
        running(vllm_url, store, tmp_path / "one") as one,
        running(vllm_url, store, tmp_path / "other") as other,
    ):
        eventually(lambda: len(store.proxy_instances.running(None, 0.0)) == 2)
        request: Any = {"model": "agent"}
        for turn in range(6):  # each right after the one before, at the proxy that did not make it
            proxy = (one, other)[turn % 2]
            answer = proxy.agent().responses.create(input=f"#say=turn.{turn}", **request)
            request["previous_response_id"] = answer.id
        assert len(vllm.calls[-1]["messages"]) == 11
        unknown = answer.id[:-1] + ("1" if answer.id.endswith("0") else "0")
        with pytest.raises(openai.NotFoundError):
            one.agent().responses.create(model="agent", input="hi", previous_response_id=unknown)


def test_an_unknown_previous_response_is_a_404(proxy: Proxy) -> None:
    agent = proxy.agent()
    with pytest.raises(openai.NotFoundError, match="not known"):
        agent.responses.create(model="agent", input="hi", previous_response_id="resp_x")
    kept = agent.responses.create(model="agent", input="hi")
    proxy.settled()
    with pytest.raises(openai.NotFoundError):
        proxy.agent(key="another").responses.create(model="agent", input="hi", previous_response_id=kept.id)


def test_structured_output_and_choices_of_tools_reach_vllm(proxy: Proxy, vllm: ScriptedVllm) -> None:
    schema = {"type": "object", "properties": {}}
    request: Any = {"input": "hi", "tools": [*TOOLS, {**TOOLS[0], "name": "read"}], "reasoning": {"effort": "low"}}
    request["text"] = {"format": {"type": "json_schema", "name": "a", "schema": schema, "strict": True}}
    allowed: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "read"}]}
    proxy.agent().responses.create(model="agent", tool_choice=allowed, **request)
    sent = vllm.calls[-1]
    assert sent["response_format"]["json_schema"] == {"name": "a", "schema": schema, "strict": True}
    assert ([t["function"]["name"] for t in sent["tools"]], sent["tool_choice"]) == (["read"], "required")
    assert sent["reasoning_effort"] == "low"


@pytest.mark.slow
def test_images_are_passed_on_recorded_and_marked(proxy: Proxy, vllm: ScriptedVllm) -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "low"}
    item: Any = {"role": "user", "content": [{"type": "input_text", "text": "see"}, image]}
    proxy.agent().responses.create(model="agent", input=[item])
    assert vllm.calls[-1]["messages"][0]["content"][1]["image_url"]["url"] == image["image_url"]
    assert proxy.last_call().untrainable == "image"


@pytest.mark.parametrize("streamed", [False, True])
def test_a_cut_answer_is_incomplete(proxy: Proxy, streamed: bool) -> None:
    request: Any = {"model": "agent", "input": "#say=hi #length"}
    if streamed:
        last: Any = list(proxy.agent().responses.create(**request, stream=True))[-1]
        assert last.type == "response.incomplete"
        answer = last.response
    else:
        answer = proxy.agent().responses.create(**request)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output[0].status == "incomplete"


@pytest.mark.parametrize("how", ["cut", "fault"])
def test_a_failure_in_mid_stream_is_reported_and_recorded(proxy: Proxy, how: str) -> None:
    request: Any = {"model": "agent", "input": f"#say=abcdef #{how}=3"}
    events: Any = list(proxy.agent().responses.create(**request, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "abc"
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.message
    call = proxy.last_call()
    assert (call.state, unpack_ids(call.choices[0].token_ids)) == (CallState.FAILED, tuple(b"abc"))


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"model": "agent"}, 400, "input"),
        ({"model": "agent", "input": []}, 400, "empty"),
        ({"model": 5, "input": "hi"}, 400, "model"),
        ({"model": "gpt-9", "input": "hi"}, 404, "there are"),
        ({"model": "agent", "input": "hi", "background": True}, 400, "background"),
        ({"model": "agent", "input": [{"type": "item_reference", "id": "x"}]}, 404, "the item 'x' is not known"),
        ({"model": "agent", "input": [{"type": "function_call"}]}, 400, "missing"),
        ({"model": "agent", "input": [5]}, 400, "wrong type"),
        ({"model": "agent", "input": "#status=429"}, 429, "scripted failure"),
    ],
)
def test_bad_requests_get_an_error_that_names_the_fault(proxy: Proxy, body: Any, status: int, says: str) -> None:
    answer = proxy.http.post("/v1/responses", json=body)
    assert answer.status_code == status
    assert says in answer.json()["error"]["message"]


@pytest.mark.parametrize("streamed", [False, True])
def test_logprobs_are_sent_to_clients_that_include_them(proxy: Proxy, vllm: ScriptedVllm, streamed: bool) -> None:
    request: Any = {"input": "#say=abc", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    logprobs = answer_of(proxy.agent(), streamed, **request).output[0].content[0].logprobs
    assert [(one.token, one.logprob) for one in logprobs][:3] == [("a", -0.5), ("b", -0.625), ("c", -0.75)]
    assert vllm.calls[-1]["top_logprobs"] == 2
    without = answer_of(proxy.agent(), streamed, input="#say=abc").output[0].content[0].logprobs
    assert not without
    assert proxy.last_call().untrainable is None


def test_logprobs_come_with_the_pieces_of_a_stream(proxy: Proxy) -> None:
    include: Any = ["message.output_text.logprobs"]
    stream = proxy.agent().responses.create(model="agent", input="#say=abc", include=include, stream=True)
    pieces = [event for event in stream if event.type == "response.output_text.delta"]
    assert [(piece.delta, [one.token for one in piece.logprobs]) for piece in pieces] == [(c, [c]) for c in "abc"]


def test_the_tools_of_a_namespace_are_tools_and_their_calls_name_it(proxy: Proxy, vllm: ScriptedVllm) -> None:
    tool = {"type": "function", "name": "search", "parameters": {"type": "object"}}
    space: Any = {"type": "namespace", "name": "mail", "description": "of mails", "tools": [tool]}
    answer = proxy.agent().responses.create(model="agent", input="#tool=search", tools=[space])
    assert [item.to_dict().get("namespace") for item in answer.output] == ["mail"]
    assert [given["function"]["name"] for given in vllm.calls[-1]["tools"]] == ["search"]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"input": 5}, "`input` must be text or a list of items"),
        ({"input": [{"role": "user", "content": "x"}, "y"]}, "input[1]: "),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0]: 'output' is missing"),
        ({"tools": [{"name": "x"}]}, "tools[0]: 'type' is missing"),
        ({"tools": [{"type": "function", "function": {"name": "x"}}]}, "tools: a function's `name` "),
        ({"tools": [{"type": "local_shell"}]}, "tools: a tool of the type local_shell "),
        ({"tools": [{"type": "custom", "name": ["x"]}]}, "the request has a field of "),
        (
            {"tools": [{"type": "namespace", "tools": [{"type": "function", "name": "x"}]}]},
            "the request has a field of ",
        ),
    ],
)
def test_unreadable_input_is_named_by_its_place(proxy: Proxy, more: Any, says: str) -> None:
    refused = proxy.http.post("/v1/responses", json={"model": "agent", "input": "x", **more})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith(says)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_stored_response_equals_the_one_that_was_sent(proxy: Proxy, streamed: bool) -> None:
    agent = proxy.agent()
    request: Any = {"model": "agent", "tools": TOOLS, "instructions": "be brief", "temperature": 0.5}
    question: Any = [{"role": "user", "content": "#think=hm #tool=search"}]
    if streamed:
        with agent.responses.stream(input=question, **request) as stream:
            sent = stream.until_done().get_final_response()
    else:
        sent = agent.responses.create(input=question, **request)
    kept = agent.responses.retrieve(sent.id)
    assert [item.to_dict() for item in kept.output] == [
        {name: value for name, value in item.to_dict().items() if name != "parsed_arguments"} for item in sent.output
    ]
    same = ("id", "model", "status", "created_at", "usage", "temperature", "tools", "object")
    assert {name: getattr(kept, name) for name in same} == {name: getattr(sent, name) for name in same}
    next_one = agent.responses.create(model="agent", input="#say=ok", previous_response_id=sent.id)
    assert agent.responses.retrieve(next_one.id).previous_response_id == sent.id
    items = agent.responses.input_items.list(next_one.id, order="asc", limit=2)
    kinds = [item.type for item in items]  # all pages
    assert kinds == ["message", "reasoning", "function_call", "message"]
    with pytest.raises(openai.NotFoundError):
        proxy.agent(key="another").responses.retrieve(sent.id)
    with pytest.raises(openai.PermissionDeniedError, match="DELETE /api/trajectories"):
        agent.responses.delete(sent.id)
    with pytest.raises(openai.NotFoundError, match="is recorded"):
        agent.responses.retrieve("resp_x")


def test_items_are_found_by_their_ids(proxy: Proxy, vllm: ScriptedVllm) -> None:
    agent = proxy.agent()
    first = agent.responses.create(model="agent", input="#think=hm #tool=search", tools=TOOLS)
    references: Any = [{"type": "item_reference", "id": item.id} for item in first.output]
    output = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "#say=ok"}  # type: ignore[union-attr]
    whole: Any = [{"role": "user", "content": "#think=hm #tool=search"}, *references, output]
    agent.responses.create(model="agent", input=whole, tools=TOOLS)
    sent = vllm.calls[-1]["messages"]
    assert [m["role"] for m in sent] == ["user", "assistant", "tool"]
    assert (sent[1]["reasoning"], sent[1]["tool_calls"][0]["function"]["name"]) == ("hm", "search")
    call = proxy.last_call()
    assert call.parent_call == "call_" + first.id.removeprefix("resp_")
    with pytest.raises(openai.NotFoundError, match="is not known: send the item itself"):
        proxy.agent(key="another").responses.create(model="agent", input=whole)
