"""Questions that vLLM answers itself, put to it directly and through the proxy; and what must be alike of the answers.

Left out of an answer: ids, times, the model's name, and how an engine's message names the model. Of a stream the events
count as they came, but for how text is cut into pieces and events that hold nothing.
"""

from __future__ import annotations

import json
from typing import Any

import httpx

from ratchet.demo.email_search.agent import TOOLS, opening

Json = dict[str, Any]

_HI: list[Json] = opening("Where is the picnic that Alice wrote about?")
_TOOLS = list(TOOLS)
_SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
_CHAT, _TEXT = "/v1/chat/completions", "/v1/completions"
_NAMED = {"type": "function", "function": {"name": "read_email"}}
_IMAGE = [
    {"type": "text", "text": "what is it?"},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}},
]
_AUDIO = [
    {"type": "text", "text": "what is it?"},
    {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
]
_PARTS = [{"type": "text", "text": "Where is the picnic "}, {"type": "text", "text": "that Alice wrote about?"}]
_CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "search_inbox", "arguments": '{"keywords": ["picnic"]}'},
}
_TURN: list[Json] = [
    *_HI,
    {"role": "assistant", "content": None, "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "m1: picnic"},
]
_DROPPED = ("id", "created", "model", "request_id", "prompt_token_ids", "token_ids", "system_fingerprint")


def _chat(**more: Any) -> tuple[str, Json]:
    return _CHAT, {"messages": _HI, "tools": _TOOLS, "temperature": 0, "max_tokens": 40} | more


def _plain(**more: Any) -> tuple[str, Json]:
    return _CHAT, {"messages": _HI, "temperature": 0, "max_tokens": 20} | more


def _text(**more: Any) -> tuple[str, Json]:
    return _TEXT, {"prompt": "Where is", "temperature": 0, "max_tokens": 8} | more


_USAGE = {"stream": True, "stream_options": {"include_usage": True}}
QUESTIONS: dict[str, tuple[str, Json]] = {
    "chat": _chat(),
    "chat streamed": _chat(stream=True),
    "chat streamed with usage": _chat(**_USAGE),
    "usage in every chunk": _chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}),
    "a tool's result": _chat(messages=_TURN),
    "a tool's result, streamed": _chat(messages=_TURN, stream=True),
    "no tools": _plain(),
    "no tools, streamed": _plain(stream=True),
    "tools, none wanted": _chat(tool_choice="none"),
    "tools, none wanted, streamed": _chat(tool_choice="none", stream=True),
    "a named tool": _chat(tool_choice=_NAMED),
    "a named tool, streamed": _chat(tool_choice=_NAMED, stream=True),
    "some tool": _chat(tool_choice="required"),
    "some tool, streamed": _chat(tool_choice="required", stream=True),
    "n 3": _plain(n=3),
    "n 3, streamed": _plain(n=3, **_USAGE),
    "logprobs": _plain(logprobs=True, top_logprobs=3),
    "logprobs, streamed": _plain(logprobs=True, top_logprobs=3, stream=True),
    "logprobs alone": _plain(logprobs=True),
    "logprobs with tools, streamed": _chat(logprobs=True, top_logprobs=1, stream=True),
    "top_logprobs alone": _plain(top_logprobs=2),
    "top_logprobs 500": _plain(logprobs=True, top_logprobs=500),
    "prompt_logprobs": _plain(prompt_logprobs=1),
    "token ids": _plain(return_token_ids=True),
    "tokens as ids": _plain(return_tokens_as_token_ids=True, logprobs=True),
    "stop": _plain(stop=["e"]),
    "stop, streamed": _plain(stop=["e"], stream=True),
    "stop, included": _plain(stop=["e"], include_stop_str_in_output=True),
    "length": _plain(max_tokens=3),
    "max_completion_tokens": (_CHAT, {"messages": _HI, "temperature": 0, "max_completion_tokens": 3}),
    "no limit": (_CHAT, {"messages": _HI, "tools": _TOOLS, "temperature": 0}),
    "json_object": _plain(response_format={"type": "json_object"}),
    "json_schema": _plain(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}}),
    "json_schema, streamed": _plain(
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}}, stream=True
    ),
    "parts": _plain(messages=[{"role": "user", "content": _PARTS}]),
    "developer": _plain(messages=[{"role": "developer", "content": "be brief"}, _HI[-1]]),
    "a name": _plain(messages=[{**_HI[-1], "name": "bob"}]),
    "prefill": _plain(
        messages=[*_HI, {"role": "assistant", "content": "It is"}],
        add_generation_prompt=False,
        continue_final_message=True,
    ),
    "echo": _plain(echo=True),
    "legacy functions": _plain(functions=[_TOOLS[0]["function"]], function_call="auto"),
    "an unknown field": _plain(a_field_of_tomorrow=1),
    "user, metadata, store": _plain(user="u", metadata={"a": "b"}, store=False, service_tier="auto"),
    "no messages": _plain(messages=[]),
    "messages of another kind": _plain(messages="hi"),
    "a role that is none": _plain(messages=[{"role": "wizard", "content": "hi"}]),
    "no content": _plain(messages=[{"role": "user"}]),
    "null content": _plain(messages=[{"role": "user", "content": None}]),
    "empty content": _plain(messages=[{"role": "user", "content": ""}]),
    "an image": _plain(messages=[{"role": "user", "content": _IMAGE}]),
    "audio": _plain(messages=[{"role": "user", "content": _AUDIO}]),
    "a part that is none": _plain(messages=[{"role": "user", "content": [{"type": "smell"}]}]),
    "temperature -1": _plain(temperature=-1),
    "temperature as text": _plain(temperature="hot"),
    "top_p 2": _plain(top_p=2),
    "n 0": _plain(n=0),
    "max_tokens 0": _plain(max_tokens=0),
    "max_tokens -1": _plain(max_tokens=-1),
    "max_tokens over the context": _plain(max_tokens=100_000),
    "a prompt over the context": _plain(messages=[{"role": "user", "content": "picnic " * 6000}]),
    "a tool that is none": _chat(tools=[{"type": "function"}]),
    "a named tool that is not there": _chat(tool_choice={"type": "function", "function": {"name": "fly"}}),
    "tool_choice without tools": _plain(tool_choice="required"),
    "a schema that is none": _plain(response_format={"type": "json_schema"}),
    "stream_options without stream": _plain(stream_options={"include_usage": True}),
    "text": _text(),
    "text, streamed": _text(stream=True),
    "text, streamed with usage": _text(**_USAGE),
    "text, several prompts": _text(prompt=["Where is", "When was"]),
    "text, several prompts, n 2": _text(prompt=["Where is", "When was"], n=2),
    "text, several prompts, streamed": _text(prompt=["Where is", "When was"], **_USAGE),
    "text, ids": _text(prompt=[40, 41, 42]),
    "text, several prompts of ids": _text(prompt=[[40, 41], [42, 43]]),
    "text, echo": _text(echo=True),
    "text, echo, logprobs": _text(echo=True, logprobs=2),
    "text, echo, streamed": _text(echo=True, stream=True),
    "text, logprobs": _text(logprobs=2),
    "text, logprobs, streamed": _text(logprobs=2, stream=True),
    "text, n 2": _text(n=2),
    "text, stop": _text(stop="e"),
    "text, max_tokens 0 with echo": _text(max_tokens=0, echo=True),
    "text, suffix": _text(suffix="x"),
    "text, best_of": _text(best_of=2),
    "text, no prompt": (_TEXT, {"max_tokens": 3}),
    "text, empty prompt": _text(prompt=""),
    "text, empty prompts": _text(prompt=[]),
    "embeddings": ("/v1/embeddings", {"input": "x"}),
}


def answer_to(url: str, path: str, body: Json, model: str) -> str:
    """Return what must be alike of an answer, as text."""
    reply = httpx.post(url + path, json={"model": model, **body}, timeout=60)
    kind = reply.headers.get("content-type", "").partition(";")[0]
    if kind == "text/event-stream":
        return f"{reply.status_code} {json.dumps(_stream(reply.text, body), sort_keys=True)}"
    try:
        result: Any = reply.json()
    except ValueError:
        result = reply.text
    result = _bare(result) if reply.status_code == 200 else _error(result)
    return f"{reply.status_code} {json.dumps(result, sort_keys=True)}".replace(f'"{model}"', '"MODEL"')


def _bare(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _bare(one) for name, one in value.items() if name not in _DROPPED}
    return [_bare(one) for one in value] if isinstance(value, list) else value


def _error(reply_body: Any) -> Any:
    """Return the message of an error; where the shape is not OpenAI's, all of it."""
    error = reply_body.get("error") if isinstance(reply_body, dict) else None
    return {"message": str(error.get("message"))[:160]} if isinstance(error, dict) else reply_body


def _stream(text: str, body: Json) -> Any:
    """Return a stream's choices put together, its usage, and how it ended."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    choices: dict[int, Json] = {}
    for event in events:
        for choice in event.get("choices", ()):
            _put_together(
                choices.setdefault(choice["index"], {}), {k: v for k, v in _bare(choice).items() if k != "index"}
            )
    usage = [event["usage"] for event in events if event.get("usage")]
    every = bool((body.get("stream_options") or {}).get("continuous_usage_stats"))
    shapes = sorted({event.get("object", "") for event in events})
    return {"choices": choices, "usage": usage[-1:], "often": every and len(usage) > 1, "objects": shapes,
            "done": lines[-1:] == ["[DONE]"], "errors": [_error(e) for e in events if "error" in e]}  # fmt: skip


def _put_together(whole: Json, piece: Json) -> None:
    for name, value in piece.items():
        if isinstance(value, dict):
            _put_together(whole.setdefault(name, {}), value)
        elif isinstance(value, list) and name == "tool_calls":
            for call in value:
                _put_together(whole.setdefault("tool_calls", {}).setdefault(call["index"], {}), call)
        elif isinstance(value, list):
            whole[name] = [*whole.get(name, []), *value]
        elif isinstance(value, str) and name in ("content", "reasoning", "arguments", "text"):
            whole[name] = whole.get(name, "") + value
        elif value is not None:
            whole[name] = value
