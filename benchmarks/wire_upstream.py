"""An upstream that costs next to nothing: it answers like vLLM from bytes made beforehand, on a bare asyncio protocol.

An answer's content is new in every call and its token ids and logprobs have the sizes of the real ones. A request whose
body holds `"stream":true` is answered in chunks, `gap` seconds apart; one over 50 KB without tools with 160 KB.

    python -m benchmarks.wire_upstream PORT
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from typing import Any

import uvloop

MODEL = "tiny-base"
TOKENS, LARGE_TOKENS = 32, 1_700  # of an answer
PROMPT_TOKENS, LARGE_PROMPT_TOKENS = 380, 7_000
CHUNKS, GAP = 256, 0.002

_NUMBER = b"00000000"  # placeholder for the call's number in the prepared bytes
_numbers = itertools.count()


def _logprob(place: int) -> dict[str, Any]:
    word = f"w{place % 100:02d} "
    return {"token": word, "logprob": -0.5 - place % 7 / 8, "bytes": list(word.encode()), "top_logprobs": []}


def _head(kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-1f2e3d4c5b6a79881f2e3d4c5b6a7988", "object": kind, "created": 1767000000, "model": MODEL}


def whole(prompt: int, tokens: int) -> bytes:
    """Return the body of an answer with so many prompt and completion tokens."""
    places = range(tokens)
    choice = {
        "index": 0,
        "message": {
            "role": "assistant",
            "content": _NUMBER.decode() + "".join(f"w{place % 100:02d} " for place in places),
            "refusal": None, "annotations": None, "audio": None, "function_call": None, "tool_calls": [],
            "reasoning": None,
        },
        "logprobs": {"content": [_logprob(place) for place in places]},
        "finish_reason": "stop", "stop_reason": None,
        "token_ids": [1000 + place for place in places],
    }  # fmt: skip
    usage = {"prompt_tokens": prompt, "total_tokens": prompt + tokens, "completion_tokens": tokens}
    body = _head("chat.completion") | {
        "choices": [choice], "service_tier": None, "system_fingerprint": None,
        "usage": usage | {"prompt_tokens_details": None}, "prompt_logprobs": None,
        "prompt_token_ids": [1000 + place for place in range(prompt)], "kv_transfer_params": None,
    }  # fmt: skip
    return json.dumps(body, separators=(",", ":")).encode()


def _events(prompt: int, tokens: int) -> list[bytes]:
    """Return the events of a stream: the role, one token each, usage, the end."""
    head = _head("chat.completion.chunk")
    first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    bodies = [head | {"choices": [first], "prompt_token_ids": [1000 + place for place in range(prompt)]}]
    for place in range(tokens):
        text = _NUMBER.decode() if place == 0 else f"w{place % 100:02d} "
        choice = {
            "index": 0,
            "delta": {"content": text},
            "logprobs": {"content": [_logprob(place)]},
            "finish_reason": "stop" if place == tokens - 1 else None,
            "token_ids": [1000 + place],
        }
        bodies.append(head | {"choices": [choice]})
    usage = {"prompt_tokens": prompt, "total_tokens": prompt + tokens, "completion_tokens": tokens}
    bodies.append(head | {"choices": [], "usage": usage})
    events = [b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n" for body in bodies]
    return [b"%x\r\n%b\r\n" % (len(event), event) for event in [*events, b"data: [DONE]\n\n"]] + [b"0\r\n\r\n"]


def _answer(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
_CARD = {"id": MODEL, "object": "model", "created": 1, "owned_by": "vllm", "root": "x", "parent": None}
_NOT_FOUND = _answer(b'{"detail":"Not Found"}').replace(b"200 OK", b"404 Not Found", 1)
_MODELS = _answer(json.dumps({"object": "list", "data": [_CARD]}).encode())
_PLAIN = _answer(whole(PROMPT_TOKENS, TOKENS)).split(_NUMBER)
_LARGE = _answer(whole(LARGE_PROMPT_TOKENS, LARGE_TOKENS)).split(_NUMBER)
_EVENTS = _events(PROMPT_TOKENS, CHUNKS)


class _UpstreamConnection(asyncio.Protocol):
    """One kept connection, one request at a time."""

    def __init__(self) -> None:
        self._data = b""
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data = self._data + data if self._data else data
        end = self._data.find(b"\r\n\r\n")
        if end < 0:
            return
        head = self._data[:end].lower()
        at = head.find(b"content-length:")
        length = int(head[at + 15 : at + 28].split(b"\r", 1)[0]) if at >= 0 else 0
        if len(self._data) < end + 4 + length:
            return
        body, self._data = self._data[end + 4 :], b""
        if head.startswith(b"get"):
            self._transport.write(_MODELS)
        elif not head.startswith(b"post /v1/chat/completions http"):
            self._transport.write(_NOT_FOUND)
        elif b'"stream":true' in body or b'"stream": true' in body:
            self._transport.write(_STREAM)
            self._next(0, b"%08d" % next(_numbers))
        else:
            before, after = _LARGE if len(body) > 50_000 and b'"tools":' not in body else _PLAIN
            self._transport.write(b"".join((before, b"%08d" % next(_numbers), after)))

    def _next(self, place: int, number: bytes) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(_EVENTS[place].replace(_NUMBER, number) if place == 1 else _EVENTS[place])
        if place + 1 < len(_EVENTS):
            asyncio.get_running_loop().call_later(GAP, self._next, place + 1, number)


async def _serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(_UpstreamConnection, "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1])))
