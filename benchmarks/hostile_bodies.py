"""Hostile requests, made by hypothesis: bodies of every dialect with something wrong in any place, paths and headers.

Mostly a whole, good body in which one to three values are replaced by what does not belong there, at any depth: other
kinds, JSON that no encoder writes (NaN, lone surrogates, numbers of 400 digits, 5,000 levels), schemas that contain
themselves. The rest are bytes of any kind. Equal seeds make equal requests.
"""

from __future__ import annotations

import copy
import gzip
import json
import zlib
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

Json = dict[str, Any]


@dataclass(frozen=True)
class Asking:
    """One request as it goes over the wire; `kind` names it in the table."""

    kind: str
    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes


_FUNCTION = {
    "name": "search",
    "description": "finds",
    "parameters": {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]},
}
_CALL = {"id": "call_abcdefgh123", "type": "function", "function": {"name": "search", "arguments": '{"q": "x"}'}}
_CHAT: Json = {
    "model": "agent",
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "assistant", "content": None, "tool_calls": [_CALL], "reasoning": "hm"},
        {"role": "tool", "tool_call_id": "call_abcdefgh123", "content": "found"},
        {"role": "user", "content": "and now?"},
    ],
    "tools": [{"type": "function", "function": _FUNCTION}],
    "tool_choice": "auto",
    "max_tokens": 16,
    "temperature": 0.5,
    "top_p": 1.0,
    "n": 1,
    "stop": ["x"],
    "seed": 1,
    "logit_bias": {"5": 1},
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
    "stream": True,
    "stream_options": {"include_usage": True},
    "logprobs": True,
    "metadata": {"trajectory_id": "hostile"},
    "user": "someone",
}
_COMPLETION: Json = {
    "model": "agent", "prompt": "once", "max_tokens": 5, "stream": False, "logprobs": 1, "echo": False, "n": 1,
    "stop": "x", "metadata": {"trajectory_id": "text"}, "use_beam_search": False,
}  # fmt: skip
_RESPONSE: Json = {
    "model": "agent",
    "instructions": "be brief",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "call_abcdefgh123", "name": "search", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_abcdefgh123", "output": "found"},
        {"type": "custom_tool_call", "call_id": "call_abcdefgh124", "name": "run", "input": "1"},
        {"type": "custom_tool_call_output", "call_id": "call_abcdefgh124", "output": "2"},
        {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AA=="}]},
    ],
    "tools": [{"type": "function", **_FUNCTION}, {"type": "custom", "name": "run"}, {"type": "web_search"}],
    "tool_choice": {"type": "function", "name": "search"},
    "reasoning": {"effort": "low"},
    "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}},
    "max_output_tokens": 16,
    "metadata": {"trajectory_id": "items"},
    "previous_response_id": None,
    "stream": True,
    "store": True,
}
_MESSAGE: Json = {
    "model": "agent",
    "max_tokens": 16,
    "system": [{"type": "text", "text": "be brief"}],
    "messages": [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "tool_use", "id": "toolu_abcdefgh123", "name": "search", "input": {"q": "x"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_abcdefgh123", "content": [{"type": "text", "text": "f"}]},
                {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:1/x.png"}},
                {"type": "document", "source": {"type": "text", "data": "words"}},
            ],
        },
    ],
    "tools": [{"name": "search", "description": "finds", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "tool", "name": "search"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "stop_sequences": ["x"],
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
    "metadata": {"user_id": "someone"},
    "stream": True,
}
_EMBEDDING: Json = {"model": "agent", "input": ["a", "b"], "dimensions": 3}

_BODIES: dict[str, Json] = {
    "/chat/completions": _CHAT,
    "/completions": _COMPLETION,
    "/responses": _RESPONSE,
    "/messages": _MESSAGE,
    "/messages/count_tokens": _MESSAGE,
    "/embeddings": _EMBEDDING,
    "/score": _EMBEDDING,
}

# JSON texts that no encoder writes, each put in for a marker.
_FRAGMENTS = (
    b"NaN",
    b"-Infinity",
    b"1e999",
    b"9" * 400,
    b"-" + b"9" * 25,
    b"18446744073709551616",
    b"1" * 5000,
    b"0.1e-400",
    b'"\\ud800"',
    b'"\\udc00\\ud800 x"',
    b'"\xff\xfe"',
    b'"\xed\xa0\x80"',
    b'"\\u0000"',
    b'"\\q"',
    b"[" * 90 + b"]" * 90,
    b"[" * 700 + b"]" * 700,
    b'{"a":' * 450 + b"1" + b"}" * 450,
    b"[" * 5000 + b"]" * 5000,
    b'{"a":' * 5000 + b"1" + b"}" * 5000,
    b'{"a": 1, "a": 2}',
    b"[" * 2000,
    b"{,}",
    b"'x'",
    b"",
)
_MARKS = {f"@fragment{number}@": text for number, text in enumerate(_FRAGMENTS)}
_READABLE = [f"@fragment{number}@" for number in (2, 3, 4, 5, 7, 12, 14, 15, 16, 19)]
_RECURSIVE: list[Json] = [
    {"$ref": "#"},
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "$dynamicAnchor": "x"},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    {"allOf": [{"$ref": "#"}, {"$ref": "#"}]},
    {"pattern": "(a+)+$", "type": "string"},
    {"$ref": "http://127.0.0.1:1/schema.json"},
    {"$ref": "file:///etc/passwd"},
    {"enum": [[]] * 2000},
    {"type": ["object"] * 50, "minProperties": -1, "additionalProperties": 7},
]
_NAMES = st.sampled_from(
    ("role", "content", "type", "text", "id", "name", "function", "arguments", "tool_calls", "index", "url", "model")
)
_ODD_TEXT = st.one_of(
    st.text(max_size=30),
    st.sampled_from(("\x00", "﻿", "‮", "\U0010ffff", "e" + "́" * 300, "\r\nx: y", "../../etc/passwd", "%00")),
    st.sampled_from(("agent@0", "agent@-1", "agent@999999999", "agent@", "@", "resp_0", "call_x" * 50, "#status=418")),
    st.builds("x".__mul__, st.sampled_from((129, 70_000, 300_000))),
)
_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from((2**31, 2**63, -(2**63), 2**64 - 1, -1, 0)),
    st.floats(allow_nan=False, allow_infinity=False),
    _ODD_TEXT,
    st.sampled_from(_READABLE),
    st.sampled_from(_READABLE + sorted(_MARKS)),
)
_LAX = (1, 1.0, "1", "true", "Yes", "on", 0, "0", "false", "off")  # what vLLM reads as booleans, and as numbers
_VALUES = st.one_of(
    _LEAVES,
    st.recursive(
        _LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=3), max_leaves=6
    ),
    st.sampled_from(_RECURSIVE),
    st.sampled_from(_LAX),
)
_GONE = object()


def _places(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value within a value; a wrong model is refused before the rest is read, so seldom it."""
    found = [here] * (1 if here == ("model",) else 3) if here else []
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in pairs:
        found += _places(inner, (*here, name))
    return found


def _put(body: Json, place: tuple[Any, ...], value: Any) -> None:
    """Put a value where another one is, or take that one out; a place that is gone by now stays so."""
    inner: Any = body
    try:
        for name in place[:-1]:
            inner = inner[name]
        if value is _GONE:
            del inner[place[-1]]
        else:
            inner[place[-1]] = value
    except (KeyError, IndexError, TypeError):
        return


def _encoded(value: Any) -> bytes:
    text = json.dumps(value).encode()
    for mark, fragment in _MARKS.items():
        text = text.replace(b'"' + mark.encode() + b'"', fragment)
    return text


@st.composite
def _mutated(draw: st.DrawFn, path: str) -> bytes:
    """A good body with one to three values that do not belong there."""
    body = copy.deepcopy(_BODIES[path])
    for _ in range(draw(st.sampled_from((1, 1, 1, 2, 3)))):
        value = draw(st.one_of(st.just(_GONE), _VALUES, _VALUES))
        _put(body, draw(st.sampled_from(_places(_BODIES[path]))), value if value is _GONE else copy.deepcopy(value))
    if draw(st.booleans()):
        body["stream"] = False
    if draw(st.integers(0, 3)) == 0:
        body[draw(_ODD_TEXT)] = draw(_VALUES)
    return _encoded(body)


def _bomb(size: int) -> bytes:
    return gzip.compress(b'{"model":"agent","messages":[{"role":"user","content":"' + b"a" * size + b'"}]}')


_MANY = (
    b'{"model":"agent","messages":[' + b",".join([b"{}"] * 30_000) + b"]}",
    b'{"model":"agent","messages":[' + b",".join([b'{"role":"user","content":"x"}'] * 20_000) + b"]}",
    b'{"model":"agent","messages":[{"role":"user","content":"x"}],"tools":[' + b",".join([b"{}"] * 30_000) + b"]}",
    b'{"model":"agent","input":[' + b",".join([b'{"role":"user","content":"x"}'] * 20_000) + b"]}",
    b'{"model":"agent","max_tokens":1,"messages":[' + b",".join([b'{"role":"user","content":"x"}'] * 20_000) + b"]}",
    b'{"model":"agent","prompt":[' + b",".join([b"[]"] * 60_000) + b"]}",
    b'{"model":"agent","prompt":[' + b",".join([b"7"] * 100_000) + b"]}",
)
_RAW = st.one_of(
    st.binary(max_size=200),
    st.sampled_from((b"", b"null", b"[]", b'"x"', b"{}", b"{", b"\x00", b"\xef\xbb\xbf{}", b"[" * 100_000, b"{}{}")),
    st.sampled_from((b'{"model":"agent"' + b" " * 100_000 + b"}", b'{"a":' * 50_000, b'{"messages":' + b"[" * 900)),
    st.sampled_from(_MANY),
    _VALUES.map(_encoded),
)
_PREFIXES = st.sampled_from(
    ("/v1", "", "/t/run-1/v1", "/t/%2e%2e%2f/v1", "/t/" + "x" * 300 + "/v1", "/t/ä%00/v1", "/v1/")
)
_ODD_PATHS = st.sampled_from(
    (
        "/", "//", "/v1", "/v1/../../etc/passwd", "/v1/%2e%2e/metrics", "/t/..%2f..%2fapi/calls", "/t/x/api/calls",
        "/t/x/../../api/calls", "/api/../v1/models", "/api/calls/..%2f..%2fkeys", "/api/calls/%00", "/api//calls",
        "/v1/models/agent@0", "/v1/models/" + "x" * 5000, "/v1/models/%ff%fe", "/v1/load_lora_adapter", "/v1/sleep",
        "/v1/%6coad_lora_adapter", "/v1//load_lora_adapter", "/v1/x/load_lora_adapter", "/v1/chat%2fcompletions",
        "/v1/chat/completions/../completions", "/v1/files/../../x", "/v1/responses/resp_1/cancel",
        "/metrics/../api/calls", "/health/../api/calls", "/health/live/../../api/calls", "/metricsx", "/ui/../api",
        "/v1/embeddings?key=x&" + "a=b&" * 2000, "/v1/chat/completions?stream=true", "/API/calls", "/api\\calls",
        "/v1/;/models", "*", "http://127.0.0.1:1/v1/models", "/t//v1/models", "/t/x", "/v1/models/?x=%zz", "/api/docs",
    )
)  # fmt: skip
_METHODS = st.sampled_from(("POST", "POST", "POST", "GET", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE"))
_ODD_HEADER = st.one_of(
    st.tuples(
        st.sampled_from(
            ("x-ratchet-trajectory", "x-session-id", "x-ratchet-task", "x-ratchet-role", "x-ratchet-tags",
             "x-request-id", "traceparent", "tracestate", "x-stainless-retry-count",
             "content-type", "accept", "cookie", "user-agent")
        ),
        st.one_of(
            st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=60),
            st.sampled_from(("x" * 20_000, "," * 5000, "../../x", "traj_1~2", "\xff", "00-" + "0" * 32 + "-0-0", "-1")),
        ),
    ),
    st.sampled_from(
        (
            ("host", "evil.example"), ("host", "127.0.0.1:1@evil.example"), ("host", "[::1"), ("host", ""),
            ("origin", "http://evil.example"), ("origin", "null"), ("origin", "http://[::1"), ("referer", "http://x"),
            ("x-forwarded-for", "127.0.0.1"), ("x-forwarded-host", "localhost"), ("forwarded", "for=127.0.0.1"),
            ("content-encoding", "gzip"), ("content-encoding", "br"), ("content-encoding", "gzip, gzip"),
            ("content-encoding", "deflate"), ("transfer-encoding", "identity"), ("expect", "100-continue"),
            ("upgrade", "websocket"), ("upgrade", "h2c"), ("connection", "upgrade"), ("range", "bytes=0-1"),
            ("x-http-method-override", "DELETE"), ("x-original-url", "/api/calls"), ("x-api-key", "x" * 9000),
        )
    ),
)  # fmt: skip
_KEYS = st.sampled_from(("own", "own", "own", "own", "own", "none", "wrong", "suffixed", "odd"))


@st.composite
def askings(draw: st.DrawFn, key: str) -> Asking:
    """One hostile request of the agent whose key is given, mostly with that key."""
    path = draw(st.sampled_from(sorted(_BODIES)))
    kind, body = path, b""
    whole = draw(_PREFIXES) + path
    choice = draw(st.integers(0, 19))
    if choice < 13:
        body = draw(_mutated(path))
    elif choice < 16:
        kind, body = "bytes", draw(_RAW)
    elif choice < 18:
        kind, whole = "paths", draw(_ODD_PATHS)
        body = draw(_RAW) if draw(st.booleans()) else b""
    else:
        kind = "headers"
        body = json.dumps({**_BODIES[path], "stream": False}).encode()
    method = draw(_METHODS) if kind == "paths" else "POST"
    headers = draw(st.lists(_ODD_HEADER, max_size=3)) if kind in ("headers", "paths") else []
    if kind == "bytes" and draw(st.integers(0, 9)) == 0:
        kind, headers = "compressed", [("content-encoding", draw(st.sampled_from(("gzip", "deflate"))))]
        bombs = (_bomb(9 * 2**20), _bomb(1000), _bomb(1000)[:-5], zlib.compress(b"{}"), gzip.compress(b"") * 3)
        body = draw(st.sampled_from(bombs))
    sent = {"own": key, "none": "", "wrong": "rk-wrong", "suffixed": f"{key}:../x", "odd": "ÿ:"}[draw(_KEYS)]
    if sent:
        headers = [("authorization", f"Bearer {sent}"), *headers]
    return Asking(kind, method, whole, tuple(headers), body)
