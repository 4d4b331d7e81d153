"""/v1/messages under Anthropic's own SDK."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from ratchet.store.records import unpack_ids
from ratchet.store.states import CallState
from tests.harness.proxy.running_proxy import Proxy
from tests.harness.proxy.scripted_vllm import END, ScriptedVllm, render

TOOLS: Any = [{"name": "search", "description": "finds", "input_schema": {"type": "object"}}]


@pytest.fixture
def client(proxy: Proxy) -> Iterator[anthropic.Anthropic]:
    """An agent on Anthropic's SDK; its key travels as x-api-key."""
    with anthropic.Anthropic(
        base_url=proxy.url, api_key="k", max_retries=0, timeout=60, _strict_response_validation=True
    ) as made:
        yield made


def ask(text: str, **more: Any) -> Any:
    return {"model": "agent", "max_tokens": 300, "messages": [{"role": "user", "content": text}], **more}


def test_an_answer_has_anthropics_format_and_is_recorded_with_its_ids(
    proxy: Proxy, client: anthropic.Anthropic
) -> None:
    more = {"system": "be brief", "extra_body": {"temperature": 0.5}}  # a field that its SDK no longer has
    answer = client.messages.create(**ask("#think=let.me.see #say=hello.there", **more))
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert answer.content[1].text == "hello there"
    assert (answer.stop_reason, answer.model, answer.type) == ("end_turn", "agent@0", "message")
    call = proxy.last_call()
    assert (call.dialect, call.state, call.untrainable) == ("messages", CallState.ANSWERED, None)
    assert unpack_ids(call.choices[0].token_ids) == (*b"<think>let me see</think>hello there", END)
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (call.prompt_tokens, call.completion_tokens)
    assert (call.sampling["temperature"], call.sampling["max_tokens"]) == (0.5, 300)
    found = proxy.store.trajectories.read(call.trajectory_id)
    assert [m["role"] for m in found.messages] == ["system", "user", "assistant"]
    assert found.messages[-1]["reasoning"] == "let me see"


def test_a_stream_arrives_in_blocks_with_the_same_content(proxy: Proxy, client: anthropic.Anthropic) -> None:
    with client.messages.stream(**ask("#think=hm #say=hello.there")) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert [block.type for block in final.content] == ["thinking", "text"]
    assert final.content[1].text == "hello there"  # type: ignore[union-attr]
    call = proxy.last_call()
    assert final.usage.output_tokens == call.completion_tokens
    assert unpack_ids(call.choices[0].token_ids) == (*b"<think>hm</think>hello there", END)


@pytest.mark.parametrize("streamed", [False, True])
def test_parallel_tool_calls_are_one_turn_and_their_results_continue_it(
    proxy: Proxy, client: anthropic.Anthropic, vllm: ScriptedVllm, streamed: bool
) -> None:
    question = ask("#tool=search+read", tools=TOOLS, tool_choice={"type": "any"})
    if streamed:
        with client.messages.stream(**question) as stream:
            answer: Any = stream.get_final_message()
    else:
        answer = client.messages.create(**question)
    assert answer.stop_reason == "tool_use"
    assert [(b.name, b.input) for b in answer.content] == [("search", {"q": "budget", "n": 2})] * 1 + [
        ("read", {"q": "budget", "n": 2})
    ]
    first = proxy.last_call()
    assert vllm.calls[-1]["tool_choice"] == "required"
    results = [{"type": "tool_result", "tool_use_id": block.id, "content": "found"} for block in answer.content]
    results[1] |= {"is_error": True}
    history = [*question["messages"], {"role": "assistant", "content": answer.content}]
    history.append({"role": "user", "content": [*results, {"type": "text", "text": "#say=done"}]})
    client.messages.create(**(question | {"messages": history}))
    second = proxy.last_call()
    assert (second.parent_call, second.trajectory_id) == (first.id, first.trajectory_id)
    assert second.linked_by == "graph+tool_ids"
    sent = vllm.calls[-1]["messages"]
    assert [m["role"] for m in sent] == ["user", "assistant", "tool", "tool", "user"]
    assert [m["content"] for m in sent[2:4]] == ["found", "Error: found"]


def test_arguments_that_are_not_json_are_echoed_unchanged(
    proxy: Proxy, client: anthropic.Anthropic, vllm: ScriptedVllm
) -> None:
    answer = client.messages.create(**ask("#broken", tools=TOOLS))
    history: Any = [ask("#broken")["messages"][0], {"role": "assistant", "content": answer.content}]
    history.append({"role": "user", "content": "again #status=400"})
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(**(ask("") | {"messages": history}))
    assert vllm.calls[-1]["messages"][1]["tool_calls"][0]["function"]["arguments"] == "{broken"
    assert proxy.last_call().linked_by == "graph+tool_ids"


def test_images_are_passed_on_recorded_and_marked(
    proxy: Proxy, client: anthropic.Anthropic, vllm: ScriptedVllm
) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "see"}]
    client.messages.create(**(ask("") | {"messages": [{"role": "user", "content": content}]}))
    assert vllm.calls[-1]["messages"][0]["content"][0]["image_url"]["url"] == "data:image/png;base64,AAAA"
    assert proxy.last_call().untrainable == "image"


@pytest.mark.parametrize(
    ("text", "reason", "stop"), [("#length", "max_tokens", None), ("#stopped=END", "stop_sequence", "END")]
)
@pytest.mark.parametrize("streamed", [False, True])
def test_the_stop_reason_is_reported(
    client: anthropic.Anthropic, text: str, reason: str, stop: str | None, streamed: bool
) -> None:
    if streamed:
        with client.messages.stream(**ask(text, stop_sequences=["END"])) as stream:
            answer: Any = stream.get_final_message()
    else:
        answer = client.messages.create(**ask(text, stop_sequences=["END"]))
    assert (answer.stop_reason, answer.stop_sequence) == (reason, stop)


@pytest.mark.parametrize("how", ["cut", "fault"])
def test_a_failure_in_mid_stream_is_reported_and_recorded(proxy: Proxy, client: anthropic.Anthropic, how: str) -> None:
    seen = ""
    with (  # noqa: PT012 -- the words before it count as well
        pytest.raises(anthropic.APIStatusError),
        client.messages.stream(**ask(f"#say=abcdef #{how}=3")) as stream,
    ):
        for text in stream.text_stream:
            seen += text
    assert seen == "abc"
    call = proxy.last_call()
    assert (call.state, unpack_ids(call.choices[0].token_ids)) == (CallState.FAILED, tuple(b"abc"))


def test_errors_have_anthropics_shape(proxy: Proxy) -> None:
    def error(body: Any, status: int) -> Any:
        answer = proxy.http.post("/v1/messages", content=body if isinstance(body, bytes) else json.dumps(body))
        assert answer.status_code == status
        assert answer.json()["type"] == "error"
        return answer.json()["error"]

    assert error(b"{", 400)["type"] == "invalid_request_error"
    assert "max_tokens" in error({"model": "agent", "messages": []}, 400)["message"]
    assert error({**ask("hi"), "model": "gpt-9"}, 404)["type"] == "not_found_error"
    assert error(ask("#status=429"), 429) == {"type": "rate_limit_error", "message": "scripted failure"}
    thread = error(ask("hi", thread={"type": "create"}), 400)
    assert thread["details"]["error_code"] == "thread_unsupported_request"
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AA"}}
    assert "document" in error({**ask(""), "messages": [{"role": "user", "content": [pdf]}]}, 400)["message"]
    assert error({**ask(""), "messages": [{"role": "user", "content": 5}]}, 400)["type"] == "invalid_request_error"


def test_an_error_within_a_stream_has_the_type_of_its_status(proxy: Proxy) -> None:
    text = proxy.http.post("/v1/messages", json={**ask("#tokens=9 #fault=3"), "stream": True}).text
    last = json.loads(text.rsplit("data: ", 1)[1])
    assert last == {
        "type": "error",
        "error": {"type": "api_error", "message": "scripted fault", "details": {"error_code": "status_500"}},
    }


def test_tokens_are_counted_by_vllms_own_template(
    proxy: Proxy, client: anthropic.Anthropic, vllm: ScriptedVllm
) -> None:
    counted = client.messages.count_tokens(
        model="agent", messages=[{"role": "user", "content": "hi"}], system="s", tools=TOOLS
    )
    expected = render([{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}])
    assert counted.input_tokens == len(expected)
    assert vllm.calls[-1]["tools"][0]["function"]["name"] == "search"
    proxy.settled()
    assert proxy.store.calls.page(1) == []


THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "s"}
USE = {"type": "tool_use", "id": "toolu_1", "name": "search", "input": {}}


@pytest.mark.parametrize(
    ("last", "is_continued"),
    [
        ({"role": "assistant", "content": '{"city": '}, True),
        ({"role": "assistant", "content": [{"type": "text", "text": '{"city": '}]}, True),
        ({"role": "assistant", "content": ""}, False),
        ({"role": "assistant", "content": [THOUGHT, {"type": "text", "text": "It"}]}, False),
        ({"role": "assistant", "content": [{"type": "text", "text": "I search"}, USE]}, False),
        ({"role": "user", "content": "and?"}, False),
    ],
)
def test_a_final_assistant_text_is_continued(
    client: anthropic.Anthropic, vllm: ScriptedVllm, last: Any, is_continued: bool
) -> None:
    history = [*ask("Where?")["messages"], last]
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    client.messages.create(**ask("") | {"messages": history})
    assert fields.items() <= vllm.calls[-1].items() if is_continued else fields.keys().isdisjoint(vllm.calls[-1])
    client.messages.count_tokens(model="agent", messages=history)
    assert vllm.calls[-1]["add_generation_prompt"] is not is_continued
    assert vllm.calls[-1].get("continue_final_message", False) is is_continued


@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_that_continued_a_text_is_found_in_the_joined_text(
    proxy: Proxy, client: anthropic.Anthropic, streamed: bool
) -> None:
    prefix = '{"city": #say=Oslo}'
    question, prefill = {"role": "user", "content": "Where?"}, {"role": "assistant", "content": prefix}
    fields = ask("") | {"messages": [question, prefill]}
    if streamed:
        with client.messages.stream(**fields) as events:
            answer: Any = events.get_final_message()
    else:
        answer = client.messages.create(**fields)
    joined = {"role": "assistant", "content": prefix + answer.content[0].text}
    for text in ("#say=a", "#say=b"):  # the second one repeats the prompt of the first
        client.messages.create(**ask("") | {"messages": [question, joined, {"role": "user", "content": text}]})
    proxy.settled()
    *later, first = proxy.store.calls.page(10)
    assert {call.trajectory_id for call in later} == {first.trajectory_id}
    assert [(call.linked_by, call.parent_call) for call in later] == [("graph", first.id)] * 2


def test_consecutive_assistant_messages_are_one_turn(
    proxy: Proxy, client: anthropic.Anthropic, vllm: ScriptedVllm
) -> None:
    question = ask("#think=hm #tool=search", tools=TOOLS)
    answer = client.messages.create(**question)
    assert [block.type for block in answer.content] == ["thinking", "tool_use"]
    use: Any = answer.content[-1]
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "#say=Oslo"}
    one_by_one: Any = [{"role": "assistant", "content": [block]} for block in answer.content]
    messages = [*question["messages"], *one_by_one, {"role": "user", "content": [result]}]
    client.messages.create(**question | {"messages": messages})
    assert [message["role"] for message in vllm.calls[-1]["messages"]] == ["user", "assistant", "tool"]
    assert proxy.last_call().linked_by.startswith("graph")
    texts: Any = [{"role": "assistant", "content": text} for text in ("a", "b")]
    client.messages.create(**question | {"messages": [*question["messages"], *texts, *question["messages"]]})
    assert vllm.calls[-1]["messages"][1] == {"role": "assistant", "content": "ab"}


def test_the_sdks_tool_runner_completes_its_loop(proxy: Proxy, client: anthropic.Anthropic) -> None:
    @anthropic.beta_tool
    def search(q: str, n: int) -> str:
        """Search.

        Args:
            q: what
            n: how many
        """
        return f"#say=found.{n}.{q}"

    runner = client.beta.messages.tool_runner(
        model="agent", max_tokens=300, tools=[search], messages=[{"role": "user", "content": "#tool=search"}]
    )
    final = runner.until_done()
    assert final.content[0].text == "found 2 budget"  # type: ignore[union-attr]
    proxy.settled()
    answered = [call for call in proxy.store.calls.page(10) if call.state == CallState.ANSWERED]
    assert len({call.trajectory_id for call in answered}) == 1
    assert len(answered) == 2


def test_the_sdk_reads_the_request_id(proxy: Proxy, client: anthropic.Anthropic) -> None:
    answer = client.messages.with_raw_response.create(**ask("#say=hello"))
    assert answer.request_id == answer.headers["x-request-id"] == answer.headers["x-ratchet-call"]
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(**(ask("hi") | {"messages": []}))
    assert str(refused.value.request_id).startswith("req_")


@pytest.mark.slow
def test_models_are_listed_in_anthropics_format(client: anthropic.Anthropic) -> None:
    page = client.models.list()
    assert [(card.id, card.type, card.display_name) for card in page] == [
        ("agent", "model", "agent"),
        ("agent@0", "model", "agent@0"),
    ]
    assert (page.has_more, page.first_id, page.last_id) == (False, "agent", "agent@0")
    assert client.models.retrieve("agent@0").created_at.year >= 2026
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.models.retrieve("nobody")
    assert unknown.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]


def test_documents_and_search_results_of_text_are_text(
    proxy: Proxy, client: anthropic.Anthropic, vllm: ScriptedVllm
) -> None:
    text = {"type": "text", "text": "it rains"}
    found = {"type": "search_result", "source": "http://x", "title": "Weather", "content": [text]}
    paper = {"type": "document", "title": "Paper", "source": {"type": "content", "content": [text]}}
    used = {"type": "tool_use", "id": "t1", "name": "search", "input": {}}
    answered = {"type": "tool_result", "tool_use_id": "t1", "content": [found]}
    messages = [
        {"role": "user", "content": [paper]},
        {"role": "assistant", "content": [used]},
        {"role": "user", "content": [answered, {"type": "text", "text": "#say=ok"}]},
    ]
    client.messages.create(model="agent", max_tokens=9, messages=messages, tools=TOOLS)  # type: ignore[arg-type]
    sent = vllm.calls[-1]["messages"]
    assert [m["role"] for m in sent] == ["user", "assistant", "tool", "user"]
    assert sent[0]["content"] == "Paper\nit rains"
    assert sent[2]["content"] == "Weather\nhttp://x\nit rains"


def test_tools_that_the_client_runs_for_anthropic_are_functions_here(
    proxy: Proxy, client: anthropic.Anthropic, vllm: ScriptedVllm
) -> None:
    tools: Any = [
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
        {"type": "memory_20250818", "name": "memory"},
        {"type": "web_search_20250305", "name": "web_search"},
    ]
    answer = client.messages.create(**ask('#tool=bash #args={"command":"ls"}', tools=tools))
    assert [(block.name, block.input) for block in answer.content if block.type == "tool_use"] == [
        ("bash", {"command": "ls"})
    ]
    given = {tool["function"]["name"]: tool["function"]["parameters"] for tool in vllm.calls[-1]["tools"]}
    assert list(given) == ["bash", "str_replace_based_edit_tool", "memory"]
    assert "rename" in given["memory"]["properties"]["command"]["enum"]
    assert proxy.last_call().untrainable is None
    with pytest.raises(anthropic.BadRequestError, match="computer_20250124 is not supported"):
        client.messages.create(**ask("x", tools=[{"type": "computer_20250124", "name": "computer"}]))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"messages": [{"role": "user", "content": None}]}, "messages.0: "),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "user"}]}, "messages.1: 'content' is missing"),
        ({"messages": ["x"]}, "messages.0: "),
        ({"tools": [{"name": "x"}]}, "tools.0: 'input_schema' is missing"),
    ],
)
def test_unreadable_input_is_named_by_its_place(proxy: Proxy, body: Any, says: str) -> None:
    refused = proxy.http.post("/v1/messages", json={**ask("x"), **body})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith(says)


def test_a_texts_citations_are_a_list(proxy: Proxy) -> None:
    """Anthropic's schema requires the member, and the AI SDK refuses null."""
    whole = proxy.http.post("/v1/messages", json=ask("#say=hi")).json()
    assert whole["content"] == [{"type": "text", "text": "hi", "citations": []}]
    streamed = proxy.http.post("/v1/messages", json=ask("#say=hi", stream=True)).text
    assert '"content_block":{"type":"text","text":"","citations":[]}' in streamed


def test_later_system_messages_are_reminders_in_a_user_turn(proxy: Proxy, vllm: ScriptedVllm) -> None:
    later = {"role": "system", "content": [{"type": "text", "text": "the date is set"}]}
    reminder = "<system-reminder>\nthe date is set\n</system-reminder>"
    messages: list[Any] = [{"role": "user", "content": "#say=hello"}, later]
    for _ in range(2):
        body = {"model": "agent", "max_tokens": 99, "system": "be brief", "messages": messages}
        answer = proxy.http.post("/v1/messages", json=body).json()
        messages += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": "on"}, later]
    given = vllm.calls[-1]["messages"]
    assert [m["role"] for m in given] == ["system", "user", "assistant", "user"]
    assert given[1]["content"] == f"#say=hello\n\n{reminder}"
    call = proxy.last_call()
    assert (call.linked_by, call.context) == ("graph", "exact")
