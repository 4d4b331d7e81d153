"""The scripted vLLM with the endpoints of `--enable-scale-out`: render, generate, derender and detokenize.

`odd_template` renders in an unusual way, `refuse` maps paths to the error status that each returns, `derenders_left`
makes derender fail after so many calls, and `offered` is whether the endpoints exist. A turn end inside an answer is
derendered as its text.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.types import Receive, Scope, Send

from tests.harness.proxy.scripted_vllm import END, TURN, ScriptedVllm, logprob, render

RENDER, GENERATE = "/v1/chat/completions/render", "/inference/v1/generate"
DERENDER, DETOKENIZE = "/v1/chat/completions/derender", "/detokenize"
SPELLED = {TURN: "<|turn|>", END: "<|end|>"}

Json = dict[str, Any]


class ScriptedScaleOut(ScriptedVllm):
    """The ASGI application. `generated` holds the bodies of generate, `derendered` counts derender calls."""

    def restart(self) -> None:
        """Forget everything, as a process that has just started."""
        super().restart()
        self.offered = True
        self.odd_template = False  # ends a turn before a tool call, and after it
        self.refuse: dict[str, int] = {}
        self.derenders_left = 1_000_000
        self.odd_words = False  # derender returns strings instead of objects
        self.generated: list[Json] = []
        self.rendered: list[Json] = []
        self.derendered = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in (RENDER, GENERATE, DERENDER, DETOKENIZE):
            await super().__call__(scope, receive, send)
            return
        body = json.loads(await _body(receive))
        path = scope["path"]
        if not self.offered and path != DETOKENIZE:
            await _json(send, 404, {"detail": "Not Found"})
        elif path in self.refuse:
            await _json(send, self.refuse[path], {"error": {"message": "scripted", "code": self.refuse[path]}})
        elif body.get("model", self.base) not in (self.base, *self.adapters):
            await _json(send, 404, {"error": {"message": f"The model `{body['model']}` does not exist.", "code": 404}})
        elif path == RENDER:
            await _json(send, 200, self._render(body))
        elif path == GENERATE:
            await self._generate(body, receive, send)
        elif path == DERENDER:
            await self._derender(body, send)
        else:
            await _json(send, 200, {"prompt": spelled(body["tokens"])})

    def _render(self, body: Json) -> Json:
        assert "stream_options" not in body, "vLLM refuses them without a stream"
        self.rendered.append(body)
        sampling = {"max_tokens": body.get("max_tokens") or 4096, "n": int(body.get("n") or 1)}
        ids = render(body["messages"])
        if self.odd_template:
            ids = [part for place, token in enumerate(ids) for part in self._twice(ids, place, token)]
        return {"request_id": "chatcmpl-r", "token_ids": ids, "model": body["model"],
                "sampling_params": sampling, "stream": False}  # fmt: skip

    def _twice(self, ids: Sequence[int], place: int, token: int) -> list[int]:
        begins_call = bytes(i % 256 for i in ids[place : place + 11]) == b"<tool_call>"
        return [END, token] if begins_call else [token]

    async def _generate(self, body: Json, receive: Receive, send: Send) -> None:
        self.generated.append(body)
        script = dict(re.findall(r"#(\w+)(?:=([^\s#]+))?", _last_turn(body["token_ids"])))
        words = [[*self._words(script).encode(), END] for _ in range(body["sampling_params"]["n"])]
        gone = asyncio.ensure_future(_gone(receive))
        try:
            if body.get("stream"):
                await self._stream_ids(body, script, words, gone, send)
                return
            await asyncio.wait([gone], timeout=float(script.get("delay", 0)) * len(words[0]))
            if gone.done():
                self.aborted += 1
                return
            choices = [_piece(index, ids, 0, script, last=True) for index, ids in enumerate(words)]
            result = {"choices": choices, "usage": _usage(body, words), "prompt_token_ids": body["token_ids"]}
            await _json(send, 200, {"request_id": "generate-tokens-r", "model": body["model"], **result})
        finally:
            gone.cancel()

    async def _stream_ids(
        self, body: Json, script: Mapping[str, str], words: Sequence[list[int]], gone: Any, send: Send
    ) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for index, ids in enumerate(words):
            for place, token in enumerate(ids):
                if "delay" in script:
                    await asyncio.wait([gone], timeout=float(script["delay"]))
                if gone.done():
                    self.aborted += 1
                    return
                if script.get("cut") == str(place):
                    raise ConnectionAbortedError("scripted")
                event: Json = {"choices": [_piece(index, [token], place, script, last=place == len(ids) - 1)]}
                if index == place == 0:
                    event["prompt_token_ids"] = body["token_ids"]
                await _event(send, event)
        await _event(send, {"choices": [], "usage": _usage(body, words)})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    def _message(self, ids: Sequence[int]) -> Any:
        return "odd" if self.odd_words else message_of(spelled(ids))

    async def _derender(self, body: Json, send: Send) -> None:
        self.derendered += 1
        if self.derendered > self.derenders_left:
            await _json(send, 500, {"error": {"message": "scripted", "code": 500}})
            return
        if not body.get("stream"):
            choices = [
                {"index": c["index"], "message": self._message(c["token_ids"]), "finish_reason": "stop"}
                for c in body["generate_response"]["choices"]
            ]
            await _json(send, 200, {"id": "x", "choices": choices})
            return
        [piece] = body["generate_chunk"]["choices"]
        before = (body.get("stream_state") or {"output_token_ids": []})["output_token_ids"]
        ids = before + piece["token_ids"]
        finish = piece["finish_reason"]
        delta = "odd" if self.odd_words else _delta(before, ids, finish)
        choice = {"index": piece["index"], "delta": delta, "finish_reason": finish}
        await _json(send, 200, {"chunk": {"choices": [choice]}, "stream_state": {"output_token_ids": ids}})


def spelled(ids: Sequence[int]) -> str:
    """Return the text of ids, special ones as they are spelled."""
    return "".join(SPELLED.get(token) or chr(token) for token in ids)


def message_of(text: str) -> Json:
    """Return an answer's text as a message."""
    thought = re.match(r"<think>(.*?)(</think>|$)", text)
    rest = text[thought.end() if thought else 0 :]
    calls = [json.loads(call) for call in re.findall(r"<tool_call>(.*?)</tool_call>", rest)]
    message: Json = {
        "role": "assistant",
        "content": None if calls else rest,
        "reasoning": thought[1] if thought else None,
    }
    if calls:
        message["tool_calls"] = [
            {"id": f"made-{number}", "type": "function",
             "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])}}
            for number, call in enumerate(calls)
        ]  # fmt: skip
    return message


def _delta(before: Sequence[int], ids: Sequence[int], finish: str | None) -> Json:
    """Return the delta of the last ids, as a parser that waits for the end of a tool call."""
    old, new = (message_of(_ready(spelled(part), done)) for part, done in ((before, None), (ids, finish)))
    delta: Json = {"role": "assistant", "content": (new["content"] or "")[len(old["content"] or "") :] or None}
    delta["reasoning"] = (new["reasoning"] or "")[len(old["reasoning"] or "") :] or None
    calls = new.get("tool_calls", [])
    delta["tool_calls"] = [{"index": k, **calls[k]} for k in range(len(old.get("tool_calls", [])), len(calls))]
    return delta


def _ready(text: str, finish: str | None) -> str:
    """Return the text that can be emitted: nothing from the start of an unfinished tool call on."""
    if "<think>" not in text and "<think>".startswith(text[:7]) and not finish:
        return ""
    head, mark, call = text.rpartition("<tool_call>")
    if mark and "</tool_call>" not in call:
        return head
    return text if finish or text.endswith("</tool_call>") or "<" not in text[-12:] else text[: text.rindex("<")]


def _piece(index: int, ids: Sequence[int], place: int, script: Mapping[str, str], *, last: bool) -> Json:
    rows = [{"token_id": token, "logprob": logprob(place + k), "top_logprobs": []} for k, token in enumerate(ids)]
    finish = ("length" if "length" in script else "stop") if last else None
    stop = script.get("stopped") if last else None
    return {"index": index, "token_ids": list(ids), "finish_reason": finish, "stop_reason": stop,
            "logprobs": {"content": rows}}  # fmt: skip


def _usage(body: Json, words: Sequence[Sequence[int]]) -> Json:
    prompt, made = len(body["token_ids"]), sum(len(ids) for ids in words)
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


def _last_turn(ids: Sequence[int]) -> str:
    """Return the text of the last ended turn, which is the client's last message."""
    turns = spelled(ids).split(SPELLED[END])
    return turns[-2]


async def _body(receive: Receive) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += bytes(message.get("body", b""))
        if not message.get("more_body"):
            return body


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _event(send: Send, value: Json) -> None:
    await send(
        {"type": "http.response.body", "body": b"data: " + json.dumps(value).encode() + b"\n\n", "more_body": True}
    )


async def _json(send: Send, status: int, value: Any) -> None:
    body = json.dumps(value).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
