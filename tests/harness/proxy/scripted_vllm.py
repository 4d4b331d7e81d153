"""A real server that answers in vLLM's exact formats, with scripted text instead of a model.

A token is a byte (0 to 255); 256 and 257 start and end a turn, so a prompt that repeats an answer verbatim starts with
its tokens. Directives in the last message script the answer: `#say=WORDS` (dots for spaces), `#tokens=N`,
`#think=WORDS` before it, `#tool=NAME` or `#tool=ONE+OTHER` (`#args=JSON` without spaces; `#drift` samples arguments
with other spacing than the template renders, `#broken` invalid JSON), `#delay=SECONDS` per token, `#status=CODE`,
`#cut=N` disconnects after N tokens, `#fault=N` sends an error event there, `#length` and `#stopped=WORD` set the finish
reason, `#noids`, `#nologprobs`, `#short` (one logprob too few), `#html` (a page), `#wait=SECONDS`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from starlette.types import Receive, Scope, Send

from tests.harness.proxy import data_models
from tests.harness.proxy.scripted_base import ScriptedBaseModel

TURN, END = 256, 257
_DIRECTIVE = re.compile(r"#(\w+)(?:=([^\s#]+))?")

Json = dict[str, Any]


def render(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the prompt's token ids: the chat template and the tokenizer in one."""
    ids: list[int] = []
    for message in messages:
        text = message.get("content") or ""
        text = text if isinstance(text, str) else "".join(part.get("text", "<image>") for part in text)
        for call in message.get("tool_calls") or ():
            function = call["function"]
            text += tool_text(function["name"], json.loads(function["arguments"]))
        ids += [TURN, *f"{message['role']}\n{text}".encode(), END]
    return [*ids, TURN, *b"assistant\n"]


def tool_text(name: str, arguments: Any, drift: bool = False) -> str:
    """Return a tool call as the model writes it."""
    text = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>{text.replace(': ', ':') if drift else text}</tool_call>"


def logprob(place: int) -> float:
    """Return the logprob of the token at a place of an answer."""
    return -0.5 - (place % 7) / 8


class ScriptedVllm:
    """The ASGI application. `calls` holds the bodies of all calls, `aborted` counts answers whose client left.

    `play(body)` returns further directives for each call (`scripts.py`).
    """

    def __init__(self, base: str = "tiny-base", play: Callable[[Json], Mapping[str, str]] | None = None) -> None:
        self.base = base
        self.play = play
        self._numbers = itertools.count()
        self.restart()

    def restart(self) -> None:
        """Forget everything, adapters too, as a process that has just started."""
        self.model = ScriptedBaseModel()
        self.adapters: dict[str, str] = {}
        self.calls: list[Json] = []
        self.paths: list[str] = []
        self.queries: list[bytes] = []
        self.loads: list[str] = []
        self.aborted = 0
        self.left_at: list[float] = []  # when a client closed before its answer was complete (monotonic seconds)
        self.failures_left = 0  # this many calls get `failure` first
        self.failure = 503
        self.max_model_len = 10_000_000

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for kind in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{kind}.complete"})
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        path = scope["path"]
        if (known := self.model.answer(path, body)) is not None:
            await _json(send, 200, known)
            return
        self.paths.append(path)
        self.queries.append(scope["query_string"])
        if path == "/v1/models":
            await _json(send, 200, self._models())
        elif path == "/v1/load_lora_adapter":
            await self._load(json.loads(body), send)
        elif path == "/v1/chat/completions":
            await self._chat(json.loads(body), receive, send)
        elif path == "/v1/embeddings" and json.loads(body).get("model", self.base) not in (self.base, *self.adapters):
            await _error(send, 404, f"The model `{json.loads(body)['model']}` does not exist.", "NotFoundError")
        elif path == "/v1/completions":
            await self._chat(with_prompt(json.loads(body)), receive, send)
        elif path == "/tokenize":
            self.calls.append(json.loads(body))
            await _json(send, 200, {"count": len(render(json.loads(body)["messages"])), "max_model_len": 4096})
        elif path == "/v1/nowhere":
            await _send(send, 404, b'{"detail":"Not Found"}', [(b"content-type", b"application/json")])
        else:
            await _json(send, 200, {"path": path, "body": body.decode()})

    def _models(self) -> Json:
        cards = [{"id": self.base, "object": "model", "created": 1, "owned_by": "vllm", "root": self.model.root,
                  "parent": None, "max_model_len": self.max_model_len}]  # fmt: skip
        adapters = ({**cards[0], "id": name, "parent": self.base} for name in self.adapters)
        return {"object": "list", "data": [*cards, *adapters]}

    async def _load(self, body: Json, send: Send) -> None:
        if body["lora_name"] in self.adapters:
            await _error(send, 400, f"The lora adapter '{body['lora_name']}' has already been loaded.")
            return
        await asyncio.sleep(0.01)
        self.loads.append(body["lora_name"])
        self.adapters[body["lora_name"]] = body["lora_path"]
        await _json(send, 200, "Success: LoRA adapter added successfully.")

    async def _chat(self, body: Json, receive: Receive, send: Send) -> None:
        self.calls.append(body)
        try:
            body = data_models.as_read(body)
        except ValidationError as error:
            await _error(send, 400, str(error))
            return
        script = dict(_DIRECTIVE.findall(_last_text(body["messages"])))
        script |= await asyncio.to_thread(self.play, body) if self.play else {}
        await asyncio.sleep(float(script.get("wait", 0)))
        if body["model"] not in (self.base, *self.adapters):
            await _error(send, 404, f"The model `{body['model']}` does not exist.", "NotFoundError")
        elif self.failures_left > 0:
            self.failures_left -= 1
            await _error(send, self.failure, "overloaded", headers=[(b"retry-after-ms", b"20"), (b"retry-after", b"1")])
        elif "html" in script:
            await _send(send, 502, b"<html>bad gateway</html>", [(b"content-type", b"text/html")])
        elif "status" in script:
            await _error(send, int(script["status"]), "scripted failure", headers=[(b"retry-after", b"7")])
        elif (length := len(body.get("prompt_ids") or render(body["messages"]))) > self.max_model_len:
            await _error(send, 400, data_models.too_long(length, self.max_model_len))
        else:
            await self._answer(body, script, receive, send)

    async def _answer(self, body: Json, script: Mapping[str, str], receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(_disconnected(receive))
        gone.add_done_callback(lambda done: None if done.cancelled() else self.left_at.append(time.monotonic()))
        try:
            choices = [_ScriptedChoice(index, self._words(script), body, script) for index in range(body.get("n") or 1)]
            head = {"id": f"chatcmpl-{next(self._numbers)}", "created": int(time.time()), "model": body["model"]}
            prompt = body["prompt_ids"] if "prompt_ids" in body else render(body["messages"])
            delay = float(script.get("delay", 0))
            if body.get("stream"):
                await self._stream(body, script, head, prompt, choices, delay, gone, send)
                return
            for _ in choices[0].steps if delay else ():
                await asyncio.wait([gone], timeout=delay)
                if gone.done():
                    self.aborted += 1
                    return
            await _json(send, 200, _whole(body, script, head, prompt, choices))
        finally:
            gone.cancel()

    def _words(self, script: Mapping[str, str]) -> str:
        thought = f"<think>{script['think'].replace('.', ' ')}</think>" if "think" in script else ""
        if "broken" in script:
            return thought + "<tool_call>{broken</tool_call>"
        if "tool" in script:
            text = script.get("args", '{"q":"budget","n":2}').replace(".", " ")
            text = text.replace('\\"', '"') if text.startswith('{\\"') else text  # in a tool's result in JSON
            arguments, _ = json.JSONDecoder().raw_decode(text)
            return thought + "".join(
                tool_text(name, arguments, "drift" in script) for name in script["tool"].split("+")
            )
        if "tokens" in script:
            return thought + "x" * int(script["tokens"])
        return thought + script.get("say", f"answer.{next(self._numbers)}").replace(".", " ")

    async def _stream(
        self,
        body: Json,
        script: Mapping[str, str],
        head: Json,
        prompt: list[int],
        choices: Sequence[_ScriptedChoice],
        delay: float,
        gone: asyncio.Future[None],
        send: Send,
    ) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        text = "prompt_ids" in body
        head = {**head, "object": "text_completion" if text else "chat.completion.chunk"}
        for choice in () if text else choices:
            first = {"index": choice.index, "delta": {"role": "assistant", "content": ""}}
            first |= {"logprobs": None, "finish_reason": None}
            await _event(send, {**head, "choices": [first], "prompt_token_ids": _wanted(body, script, prompt)})
        for place, step in enumerate(step for choice in choices for step in choice.steps):
            if delay:
                await asyncio.wait([gone], timeout=delay)
            if gone.done():
                self.aborted += 1
                return
            if script.get("cut") == str(place):
                raise ConnectionAbortedError("scripted")
            if script.get("fault") == str(place):
                await _event(send, {"error": {"message": "scripted fault", "type": "InternalServerError", "code": 500}})
                break
            if text:
                step = text_step(step, _wanted(body, script, prompt) if place % len(choices[0].steps) == 0 else None)
            await _event(send, {**head, "choices": [step]})
        if (body.get("stream_options") or {}).get("include_usage"):
            await _event(send, {**head, "choices": [], "usage": _usage(prompt, choices)})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


class _ScriptedChoice:
    """One scripted answer in both forms."""

    def __init__(self, index: int, words: str, body: Json, script: Mapping[str, str]) -> None:
        self.index = index
        self.words = words
        self.ids = [*words.encode(), END]
        self.message: Json = {"role": "assistant", "content": None, "refusal": None, "annotations": None, "audio": None}
        self.message |= {"function_call": None, "reasoning": None}
        self.stop_reason = script.get("stopped")
        self.deltas: dict[int, Json] = {}  # by the place of the token that brings them
        self._thought_and_text(body)
        self._tool_calls(body)
        self.finish = "tool_calls" if "tool_calls" in self.message else "stop"
        self.finish = "length" if "length" in script else self.finish
        self.steps = list(self._steps(body, script))

    def _thought_and_text(self, body: Json) -> None:
        thought = re.match(r"<think>(.*?)</think>", self.words)
        if thought and "prompt_ids" not in body:
            self.message["reasoning"] = thought[1]
            self.deltas |= {place: {"reasoning": self.words[place]} for place in range(*thought.span(1))}
        start = thought.end() if thought else 0
        if "<tool_call>" not in self.words:
            self.message["content"] = self.words[start:]
            self.deltas |= {place: {"content": self.words[place]} for place in range(start, len(self.words))}

    def _tool_calls(self, body: Json) -> None:
        for number, called in enumerate(re.finditer(r"<tool_call>(.*?)</tool_call>", self.words)):
            broken = called[1] == "{broken"
            parsed = {"name": "search"} if broken else json.loads(called[1])
            function = {"name": parsed["name"], "arguments": called[1] if broken else json.dumps(parsed["arguments"])}
            name = f"chatcmpl-tool-{uuid.uuid4().hex}"
            call = {"id": name, "type": "function", "function": function}
            self.message.setdefault("tool_calls", []).append(call)
            text, start = function["arguments"], called.start()
            result = {"index": number, **call, "function": {"name": function["name"], "arguments": ""}}
            self.deltas[start + 5] = {"tool_calls": [result]}
            self.deltas[start + 9] = {"tool_calls": [{"index": number, "function": {"arguments": text[:4]}}]}
            self.deltas[start + 10] = {"tool_calls": [{"index": number, "function": {"arguments": text[4:]}}]}

    def _steps(self, body: Json, script: Mapping[str, str]) -> Iterator[Json]:
        """The streamed choices, one per token; markup has empty deltas."""
        for place, token in enumerate(self.ids):
            last = place == len(self.ids) - 1
            step: Json = {"index": self.index, "delta": self.deltas.get(place, {})}
            step["finish_reason"] = self.finish if last else None
            step["logprobs"] = _logprobs(body, script, [token], place)
            step["token_ids"] = _wanted(body, script, [token])
            yield {**step, "stop_reason": self.stop_reason} if last else step


def _whole(
    body: Json, script: Mapping[str, str], head: Json, prompt: list[int], choices: Sequence[_ScriptedChoice]
) -> Json:
    if "prompt_ids" in body:
        ids = _wanted(body, script, prompt)
        steps = [
            {
                "index": choice.index,
                "delta": {"content": choice.words},
                "logprobs": _logprobs(body, script, choice.ids, 0),
                "finish_reason": choice.finish,
                "token_ids": _wanted(body, script, choice.ids),
            }
            for choice in choices
        ]
        result = [text_step(step, ids) for step in steps]
        return {**head, "object": "text_completion", "choices": result, "usage": _usage(prompt, choices)}
    return {
        **head,
        "object": "chat.completion",
        "choices": [
            {
                "index": choice.index,
                "message": choice.message,
                "logprobs": _logprobs(body, script, choice.ids, 0),
                "finish_reason": choice.finish,
                "stop_reason": choice.stop_reason,
                "token_ids": _wanted(body, script, choice.ids),
            }
            for choice in choices
        ],
        "service_tier": None,
        "usage": _usage(prompt, choices),
        "prompt_logprobs": None,
        "prompt_token_ids": _wanted(body, script, prompt),
        "kv_transfer_params": None,
        "a_field_of_tomorrow": {"kept": 1.50},
    }


def with_prompt(body: Json) -> Json:
    """Return a text completion's body with its prompt as ids, and as the message with the directives."""
    prompt = body["prompt"]
    ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
    text = bytes(i for i in ids if i < 256).decode()
    return {**body, "prompt_ids": ids, "messages": [{"role": "user", "content": text}]}


def text_step(step: Json, prompt_ids: list[int] | None) -> Json:
    """Return a choice in the format of text completions."""
    text = step["delta"].get("content") or ""
    rows = (step["logprobs"] or {}).get("content")
    result = {**step, "text": text, "logprobs": None, "prompt_token_ids": prompt_ids, "stop_reason": None}
    if rows is not None:
        result["logprobs"] = {
            "text_offset": [0] * len(rows),
            "token_logprobs": [row["logprob"] for row in rows],
            "tokens": [row["token"] for row in rows],
            "top_logprobs": [None] * len(rows),
        }
    return {name: value for name, value in result.items() if name != "delta"}


def _wanted(body: Json, script: Mapping[str, str], ids: list[int]) -> list[int] | None:
    return ids if body.get("return_token_ids") and "noids" not in script else None


def _logprobs(body: Json, script: Mapping[str, str], ids: list[int], place: int) -> Json | None:
    wanted = body.get("logprobs")  # a number in text completions
    if wanted is None or wanted is False or "nologprobs" in script:
        return None
    rows = [
        {"token": chr(i), "logprob": logprob(place + k), "bytes": [i % 256], "top_logprobs": []}
        for k, i in enumerate(ids)
    ]
    return {"content": rows[:-1] if "short" in script else rows}


def _usage(prompt: list[int], choices: Sequence[_ScriptedChoice]) -> Json:
    made = sum(len(choice.ids) for choice in choices)
    return {"prompt_tokens": len(prompt), "completion_tokens": made, "total_tokens": len(prompt) + made}


def _last_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text with the directives: the last one that is not a reminder of the agent's framework."""
    contents = (message.get("content") or "" for message in reversed(messages))
    texts = (c if isinstance(c, str) else " ".join(part.get("text", "") for part in c) for c in contents)
    return next((text for text in texts if not text.startswith("<system-reminder>")), "")


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _event(send: Send, value: Json) -> None:
    data = b"data: " + json.dumps(value).encode() + b"\n\n"
    await send({"type": "http.response.body", "body": data, "more_body": True})


async def _json(send: Send, status: int, value: Any, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    await _send(send, status, json.dumps(value).encode(), [(b"content-type", b"application/json"), *headers])


async def _error(
    send: Send, status: int, message: str, kind: str = "BadRequestError", headers: Sequence[tuple[bytes, bytes]] = ()
) -> None:
    error = {"message": message, "type": kind, "param": None, "code": status}
    await _json(send, status, {"error": error}, headers)


async def _send(send: Send, status: int, body: bytes, headers: Sequence[tuple[bytes, bytes]]) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


def main() -> None:
    """Serve until ended; started like vLLM, or with a port only."""
    import uvicorn

    parser = argparse.ArgumentParser()
    parser.add_argument("place", nargs="?")  # a port, or the model that vLLM would serve
    parser.add_argument("--port", type=int)
    parser.add_argument("--served-model-name", default="tiny-base")
    given, _ = parser.parse_known_args()
    app = ScriptedVllm(base=given.served_model_name)
    uvicorn.run(app, port=given.port or int(given.place), http="httptools", loop="uvloop", log_level="critical")


if __name__ == "__main__":
    main()
