"""exact_context over the scripted vLLM: one exact sequence where plain chat forks; plain chat where anything fails."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from ratchet.proxy.coordinator.conversations.token_contexts import TokenContexts
from ratchet.proxy.messages.link_records import Leaf
from ratchet.proxy.settings import ProxySettings
from ratchet.store.records import Call
from ratchet.store.store import Store
from tests.harness.proxy.running_proxy import Proxy, Start, running
from tests.harness.proxy.scripted_scale_out import DERENDER, DETOKENIZE, GENERATE, RENDER, ScriptedScaleOut
from tests.harness.proxy.servers import eventually, leave, served
from tests.proxy.test_policy import promote

FORMS = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
KEY = {"authorization": "Bearer k"}  # as `Proxy.agent` has it
CALL = "#think=hm #tool=search #drift"  # sampled without the blanks that the template puts between


@pytest.fixture
def vllm() -> ScriptedScaleOut:
    return ScriptedScaleOut()


@pytest.fixture
def vllm_url(vllm: ScriptedScaleOut) -> Iterator[str]:
    with served(vllm) as url:
        yield url


def ask(agent: openai.OpenAI, messages: list[Any], streamed: bool, **more: Any) -> Any:
    """Make a call; return its message as an agent keeps it."""
    if not streamed:
        answer = agent.chat.completions.create(model="agent", messages=messages, **more)
        return answer.choices[0].message.model_dump(exclude_none=True)
    with agent.chat.completions.stream(model="agent", messages=messages, **more) as stream:
        return stream.get_final_completion().choices[0].message.model_dump(exclude_none=True, exclude={"parsed"})


def answered(message: Any, text: str) -> list[Any]:
    """Return an answer with tool calls as the agent echoes it, and the tool's result."""
    calls = [
        {"id": call["id"], "type": "function", "function": {k: call["function"][k] for k in ("name", "arguments")}}
        for call in message["tool_calls"]
    ]
    echo = {"role": "assistant", "content": message.get("content"), "tool_calls": calls}
    return [echo, {"role": "tool", "tool_call_id": calls[0]["id"], "content": text}]


def converse(proxy: Proxy, streamed: bool, *turns: str) -> list[Any]:
    """Let an agent call a tool at every turn; return the answers."""
    agent = proxy.agent()
    messages: list[Any] = [{"role": "user", "content": f"find it {turns[0]}"}]
    answers = [ask(agent, messages, streamed)]
    for text in turns[1:]:
        messages += answered(answers[-1], text)
        answers.append(ask(agent, messages, streamed))
    return answers


def calls_of(proxy: Proxy) -> list[Call]:
    proxy.settled()
    return sorted(proxy.store.calls.page(limit=50), key=lambda call: call.started_at)


def counted(proxy: Proxy, metric: str) -> dict[str, float]:
    """Return a counter's values by its label."""
    lines = [line for line in proxy.http.get("/metrics").text.splitlines() if line.startswith(f"ratchet_{metric}{{")]
    return {line.split('"')[1]: float(line.rsplit(" ", 1)[1]) for line in lines}


@FORMS
def test_tool_calls_that_the_template_reformats_stay_one_exact_sequence(start: Start, streamed: bool) -> None:
    proxy = start()
    converse(proxy, streamed, CALL, CALL, CALL, "#say=the.end")
    calls = calls_of(proxy)
    assert [call.context for call in calls] == ["root", "exact", "exact", "exact"]
    assert [call.untrainable for call in calls] == [None] * 4
    assert counted(proxy, "exact_splices_total") == {"spliced": 3.0}
    assert counted(proxy, "exact_fallbacks_total") == {}


def test_a_wait_for_the_recorded_ids_counts_as_the_proxys_own_time(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def find_nothing(contexts: TokenContexts, leaf: Leaf) -> None:
        await asyncio.sleep(0.2)

    proxy = start()
    monkeypatch.setattr(TokenContexts, "find_context", find_nothing)
    messages: list[Any] = [{"role": "user", "content": "hi #say=a"}]
    messages += [ask(proxy.agent(), messages, False), {"role": "user", "content": "more #say=b"}]
    answer = proxy.http.post("/v1/chat/completions", json={"model": "agent", "messages": messages}, headers=KEY)
    assert float(answer.headers["x-ratchet-overhead-ms"]) > 190
    assert counted(proxy, "exact_splices_total") == {"context_unknown": 1.0}


@pytest.mark.slow
@FORMS
def test_without_exact_context_every_such_continuation_is_a_fork(
    start: Start, vllm: ScriptedScaleOut, streamed: bool
) -> None:
    proxy = start(exact_context="off")
    converse(proxy, streamed, CALL, CALL, "#say=the.end")
    assert [call.context for call in calls_of(proxy)] == ["root", "fork", "fork"]
    assert not vllm.rendered


@FORMS
def test_the_client_gets_what_plain_chat_sends(start: Start, tmp_path: Path, streamed: bool) -> None:
    turns = (CALL, CALL, "#think=so #tool=one+other #drift", "#think=well #say=the.end")
    exact = converse(start(), streamed, *turns)
    plain = converse(start(exact_context="off", journal=tmp_path / "other"), streamed, *turns)
    for message in exact + plain:
        for call in message.get("tool_calls", ()):
            assert call.pop("id").startswith("chatcmpl-tool-")
    assert exact == plain


def test_a_stream_begins_with_the_role_and_contains_only_requested_fields(start: Start) -> None:
    proxy = start()
    messages = [{"role": "user", "content": f"hi {CALL}"}]
    messages += answered(ask(proxy.agent(), messages, False), "#say=a.b.c")
    body = {"model": "agent", "messages": messages, "stream": True}
    answer = proxy.http.post("/v1/chat/completions", json=body, headers=KEY)
    lines = [line for line in answer.text.split("\n\n") if line]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert counted(proxy, "exact_splices_total") == {"spliced": 1.0}
    assert lines[-1] == "data: [DONE]"
    assert [event["choices"][0]["delta"].get("role") for event in events] == ["assistant"] + [None] * (len(events) - 1)
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == "a b c"
    assert not any(event["choices"][0].get("token_ids") or event.get("prompt_token_ids") for event in events)
    assert all(event["choices"][0]["logprobs"] is None and "usage" not in event for event in events)
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    assert len({event["id"] for event in events}) == 1


def test_a_stop_string_ends_the_text_and_the_turn_is_closed_for_the_next_call(start: Start) -> None:
    proxy = start()
    for streamed in (False, True):
        agent = proxy.agent()
        messages: list[Any] = [{"role": "user", "content": f"hi {streamed} {CALL}"}]
        messages += answered(ask(agent, messages, streamed), "#say=one.two.END #stopped=END")
        message = ask(agent, messages, streamed, stop=["END"])
        assert message["content"] == "one two "
        messages += [{"role": "assistant", "content": message["content"]}, {"role": "user", "content": "#say=more"}]
        assert ask(agent, messages, streamed)["content"] == "more"
    assert [call.context for call in calls_of(proxy)] == ["root", "exact", "exact"] * 2


def test_every_choice_of_a_call_can_be_continued(start: Start) -> None:
    proxy = start()
    agent = proxy.agent()
    first = [{"role": "user", "content": f"hi {CALL}"}]
    answer = agent.chat.completions.create(model="agent", messages=first, n=2)  # type: ignore[arg-type]
    for choice in answer.choices:
        ask(agent, first + answered(choice.message.model_dump(), CALL), False, n=2)
    assert [call.context for call in calls_of(proxy)] == ["root", "exact", "exact"]
    assert [len(call.choices) for call in calls_of(proxy)] == [2, 2, 2]


@FORMS
def test_messages_stays_exact_although_its_clients_lose_the_spacing_of_arguments(start: Start, streamed: bool) -> None:
    proxy = start()
    client = anthropic.Anthropic(base_url=proxy.url, api_key="x", max_retries=0)
    messages: list[Any] = [{"role": "user", "content": f"hi {CALL}"}]
    for _ in range(3):
        request: dict[str, Any] = {"model": "agent", "max_tokens": 500, "messages": messages}
        if streamed:
            with client.messages.stream(**request) as stream:
                blocks = stream.get_final_message().content
        else:
            blocks = client.messages.create(**request).content
        tool_uses = [
            block.model_dump(include={"type", "id", "name", "input"}) for block in blocks if block.type == "tool_use"
        ]
        result = {"type": "tool_result", "tool_use_id": tool_uses[0]["id"], "content": CALL}
        messages += [{"role": "assistant", "content": tool_uses}, {"role": "user", "content": [result]}]
    client.close()
    assert [call.context for call in calls_of(proxy)] == ["root", "exact", "exact"]


@pytest.mark.parametrize(("exact_context", "context"), [("auto", "exact"), ("off", "fork")])
def test_an_answer_in_json_is_continued_although_its_client_writes_it_with_other_spacing(
    start: Start, exact_context: str, context: str
) -> None:
    proxy = start(exact_context=exact_context)
    messages: list[Any] = [{"role": "user", "content": '#say={"a":1,"b":[2]}'}]
    first = ask(proxy.agent(), messages, streamed=False)["content"]
    echo = json.dumps(json.loads(first))
    assert (first, echo) == ('{"a":1,"b":[2]}', '{"a": 1, "b": [2]}')
    messages += [{"role": "assistant", "content": echo}, {"role": "user", "content": "#say=end"}]
    assert ask(proxy.agent(), messages, streamed=False)["content"] == "end"
    one, two = calls_of(proxy)
    assert (two.trajectory_id, two.parent_call, two.linked_by) == (one.trajectory_id, one.id, "graph")
    assert two.context == context


def test_an_adapter_is_requested_by_its_own_name(start: Start, vllm: ScriptedScaleOut) -> None:
    proxy = start()
    promote(proxy, 1)
    converse(proxy, False, CALL, CALL, CALL)
    assert [call.context for call in calls_of(proxy)] == ["root", "exact", "exact"]
    assert {body["model"] for body in vllm.generated} == {"agent@1"}


def test_where_nothing_drifts_plain_chat_answers(start: Start, vllm: ScriptedScaleOut) -> None:
    proxy = start()
    converse(proxy, False, "#tool=search", "#tool=search", "#say=end")
    assert [call.context for call in calls_of(proxy)] == ["root", "exact", "exact"]
    assert counted(proxy, "exact_splices_total") == {"undrifted": 2.0}
    assert not vllm.generated


def test_after_a_restart_the_ids_come_from_the_store(start: Start, vllm_url: str, store: Store, tmp_path: Path) -> None:
    messages: list[Any] = [{"role": "user", "content": f"hi {CALL}"}]
    with running(vllm_url, store, tmp_path) as first:
        for _ in range(2):
            messages += answered(ask(first.agent(), messages, False), CALL)
        first.settled()
    second = start(journal=tmp_path / "second")
    ask(second.agent(), messages, False)
    assert [call.context for call in calls_of(second)] == ["root", "exact", "exact"]


@FORMS
@pytest.mark.parametrize(("path", "status"), [(RENDER, 400), (GENERATE, 500), (DERENDER, 400), (DETOKENIZE, 500)])
def test_plain_chat_answers_after_a_failure_before_the_first_words(
    start: Start, vllm: ScriptedScaleOut, path: str, status: int, streamed: bool
) -> None:
    vllm.refuse[path] = status
    proxy = start()
    answers = converse(proxy, streamed, CALL, "#say=the.end")
    assert answers[-1]["content"] == "the end"
    assert [(call.context, str(call.state)) for call in calls_of(proxy)] == [("root", "answered"), ("fork", "answered")]
    assert counted(proxy, "exact_fallbacks_total") == {"exact_refused": 1.0}


def test_a_failure_that_lasts_is_one_warning_and_counted_each_time(
    start: Start, vllm: ScriptedScaleOut, caplog: pytest.LogCaptureFixture
) -> None:
    vllm.refuse[RENDER] = 400
    proxy = start()
    with caplog.at_level(logging.WARNING, "ratchet.proxy"):
        converse(proxy, False, CALL, CALL, CALL, "#say=end")
    assert counted(proxy, "exact_fallbacks_total") == {"exact_refused": 3.0}
    assert len([r for r in caplog.records if "exact_context_failed" in r.getMessage()]) == 1


def test_an_engine_without_the_endpoints_is_logged_once_and_not_called_again(
    start: Start, vllm: ScriptedScaleOut, caplog: pytest.LogCaptureFixture
) -> None:
    vllm.offered = False
    proxy = start()
    with caplog.at_level(logging.WARNING, "ratchet.proxy"):
        converse(proxy, False, CALL, CALL, CALL, "#say=end")
    assert [call.context for call in calls_of(proxy)] == ["root", "fork", "fork", "fork"]
    assert len([r for r in caplog.records if "exact_context_not_offered" in r.getMessage()]) == 1
    assert vllm.paths.count(RENDER) == 0
    assert counted(proxy, "exact_fallbacks_total") == {"exact_not_offered": 1.0}


def test_a_request_that_only_plain_chat_can_answer_gets_plain_chat(start: Start, vllm: ScriptedScaleOut) -> None:
    proxy = start()
    messages: list[Any] = [{"role": "user", "content": f"hi {CALL}"}]
    messages += answered(ask(proxy.agent(), messages, False), "#say=end")
    for more in ({"include_reasoning": False}, {"prompt_logprobs": 1}, {"continue_final_message": True}):
        ask(proxy.agent(), messages, False, extra_body=more)
    assert counted(proxy, "exact_splices_total") == {"unsuited_field": 3.0}
    ask(proxy.agent(), messages, False, extra_body={"include_reasoning": True, "add_generation_prompt": True})
    assert counted(proxy, "exact_splices_total")["spliced"] == 1.0
    assert len(vllm.generated) == 1


def test_an_answer_that_contains_the_turn_end_is_never_spliced(start: Start, vllm: ScriptedScaleOut) -> None:
    proxy = start()
    messages: list[Any] = [{"role": "user", "content": "hi #think=hm #say=a<|end|>b"}]
    answer = ask(proxy.agent(), messages, False)
    messages += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": "#say=end"}]
    ask(proxy.agent(), messages, False)
    assert counted(proxy, "exact_splices_total") == {"turn_end_spelled": 1.0}
    assert not vllm.generated


def test_a_template_whose_answers_end_elsewhere_is_never_spliced(start: Start, vllm: ScriptedScaleOut) -> None:
    vllm.odd_template = True
    proxy = start()
    converse(proxy, False, CALL, CALL, "#say=end")
    assert counted(proxy, "exact_splices_total") == {"template_unproven": 1.0, "history_edited": 1.0}
    assert [call.context for call in calls_of(proxy)] == ["root", "fork", "fork"]


def test_a_template_is_rendered_once_and_each_kind_of_answer_is_proven_once(
    start: Start, vllm: ScriptedScaleOut
) -> None:
    proxy = start()
    converse(proxy, False, *[CALL] * 6)
    assert counted(proxy, "exact_splices_total") == {"spliced": 5.0}
    assert len(vllm.rendered) == 2 + 1 + 5


def test_words_that_fail_in_mid_stream_are_an_error_event_and_recorded(start: Start, vllm: ScriptedScaleOut) -> None:
    proxy = start()
    messages: list[Any] = [{"role": "user", "content": f"hi {CALL}"}]
    messages += answered(ask(proxy.agent(), messages, False), "#tokens=40 #delay=0.01")
    vllm.derenders_left = vllm.derendered + 2
    with pytest.raises(openai.APIError):
        ask(proxy.agent(), messages, True)
    assert [(call.context, str(call.state)) for call in calls_of(proxy)][-1] == ("exact", "failed")


def test_ids_that_end_in_mid_stream_are_an_error_event(start: Start) -> None:
    proxy = start()
    messages: list[Any] = [{"role": "user", "content": f"hi {CALL}"}]
    messages += answered(ask(proxy.agent(), messages, False), "#tokens=40 #delay=0.005 #cut=30")
    with pytest.raises(openai.APIError):
        ask(proxy.agent(), messages, True)
    assert str(calls_of(proxy)[-1].state) == "failed"


@FORMS
def test_a_client_that_leaves_stops_generating_at_once(start: Start, vllm: ScriptedScaleOut, streamed: bool) -> None:
    proxy = start()
    messages: list[Any] = [{"role": "user", "content": f"hi {CALL}"}]
    messages += answered(ask(proxy.agent(), messages, False), "#tokens=400 #delay=0.02")
    body = {"model": "agent", "messages": messages, "stream": streamed}
    if streamed:
        with httpx.stream("POST", f"{proxy.url}/v1/chat/completions", json=body, headers=KEY, timeout=60) as answer:
            next(answer.iter_bytes())
    else:
        generated = len(vllm.generated)
        leave(f"{proxy.url}/v1/chat/completions", body, lambda: len(vllm.generated) > generated)
    eventually(lambda: vllm.aborted == 1)
    call = eventually(lambda: [call for call in calls_of(proxy) if str(call.state) == "aborted"])[0]
    assert bool(call.choices and call.choices[0].token_ids) is streamed


def test_bare_on_and_off_in_yaml_are_accepted() -> None:
    values = {"upstreams": ("http://x",), "model": "m", "store": "-", "journal": "j"}
    assert [ProxySettings(**values, exact_context=value).exact_context for value in (True, False, "auto")] == [
        "on", "off", "auto",
    ]  # fmt: skip
