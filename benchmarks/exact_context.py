"""exact_context beside plain chat, on the real vLLM: are the answers equal, and what does it cost?

Equality: the same seeded requests are answered by plain chat, and by generate and derender on the very ids that plain
chat renders. Compared is what the client gets, and the ids and logprobs that are recorded; streamed answers as a whole
and event by event. Cost: streams of both, in turns, in one run.

    python -m benchmarks.exact_context [--seeds N] [--url URL MODEL]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ratchet.proxy.dialects.chat import PATH
from ratchet.proxy.exact.scale_out import GENERATE, ScaleOut, generate_body
from ratchet.proxy.exact.streamed_response import StreamedResponse, StreamPacer
from ratchet.proxy.exact.whole_response import DerenderRequest, read_whole_response
from ratchet.proxy.telemetry.metrics import ProxyMetrics
from ratchet.proxy.upstreams.vllm_client import Upstream
from ratchet.proxy.wire import request_body
from ratchet.proxy.wire.capture import Capture
from ratchet.proxy.wire.request_body import ChatRequest
from ratchet.proxy.wire.upstream_response import DONE, SseParser, UpstreamResponse
from tests.harness.vllm.engine import vllm
from tests.harness.vllm.rewriting_model import TOOL, Model, make

Json = dict[str, Any]

_SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a"],
    "additionalProperties": False,
}
_THINK = {"chat_template_kwargs": {"enable_thinking": True}}
_ONCE = {"presence_penalty": 2.0, "frequency_penalty": 2.0}  # the model says its favoured ids again and again otherwise
_TOOLS: Json = {"tools": [TOOL], "parallel_tool_calls": False}
_NAMED = {"type": "function", "function": {"name": "search_inbox"}}
_JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "r", "schema": _SCHEMA}}

CASES: dict[str, Json] = {
    "text": {},
    "text, thinking": _THINK,
    "tool required": {**_TOOLS, "tool_choice": "required"},
    "tool required, thinking": {**_TOOLS, **_THINK, "tool_choice": "required"},
    "tool named": {**_TOOLS, "tool_choice": _NAMED},
    "tools auto": {**_TOOLS, "tool_choice": "auto"},
    "tools auto, thinking": {**_TOOLS, **_THINK, "tool_choice": "auto"},
    "tools none, thinking": {**_TOOLS, **_THINK, "tool_choice": "none"},
    "stop string": {"stop": ["e"]},
    "stop strings, thinking": {**_THINK, "stop": ["a", "ou"]},
    "stop token ids": {"stop_token_ids": [260, 300, 330, 350, 370, 390]},
    "length": {**_THINK, "max_tokens": 6},
    "tool cut by length": {**_TOOLS, "tool_choice": "required", "max_tokens": 12},
    "json schema": {"response_format": _JSON_SCHEMA},
    "json schema, thinking": {**_THINK, "response_format": _JSON_SCHEMA},
    "regex": {"structured_outputs": {"regex": "[a-c]{3,6}"}},
    "n=2": {"n": 2},
    "n=2, tools required": {**_TOOLS, "n": 2, "tool_choice": "required"},
    "logprobs": {"logprobs": True},
    "top_logprobs 2": {**_THINK, "logprobs": True, "top_logprobs": 2},
    "top_p, penalties": {"top_p": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.3, "min_p": 0.01},
    "ids request": {"return_token_ids": True},
}


class Both:
    """Answers a request both ways, as the client receives the responses."""

    def __init__(self, url: str, upstream: Upstream) -> None:
        self._url = url
        self._upstream = upstream
        self._scale_out = ScaleOut(upstream)
        self._pace = StreamPacer()
        self.metrics = ProxyMetrics()

    async def plain(self, request: ChatRequest, served: str) -> UpstreamResponse:
        """Return the response of plain chat."""
        return await self._upstream.post_json(self._url, PATH, request.outgoing(served))

    async def exact(self, request: ChatRequest, served: str) -> UpstreamResponse:
        """Return the response generated from the same ids and rendered by derender."""
        body = request.outgoing_fields(served)
        rendered = await self._scale_out.render(self._url, body)
        sent = generate_body(rendered, rendered.ids, body, streamed=request.streamed, in_text=request.asks_logprobs)
        ids = await self._upstream.post_json(self._url, GENERATE, sent)
        derender = DerenderRequest.of(request, "chatcmpl-x", body, rendered, rendered.ids)
        if not request.streamed:
            return await read_whole_response(self._scale_out, ids, derender)
        answer = StreamedResponse(self._scale_out, ids, derender, self._pace, self.metrics)
        await answer.wait_for_body()
        return answer


async def received(answer: UpstreamResponse, request: ChatRequest) -> tuple[list[Json], Capture]:
    """Return what the client receives (one body, or events), and the capture."""
    capture = Capture("m", asks_ids=request.asks_ids, asks_logprobs=request.asks_logprobs, asks_usage=True)
    try:
        if answer.status != 200:
            return [{"refused": answer.status, "body": (await answer.read()).decode()[:300]}], capture
        if not request.streamed:
            return [msgspec.json.decode(capture.whole(await answer.read()))], capture
        events, found = SseParser(), []
        async for piece in answer.pieces():
            for data, _ in events.feed(piece):
                if data is not None and data != DONE and (kept := capture.chunk(data)):
                    found.append(msgspec.json.decode(kept))
        return found, capture
    finally:
        answer.close()


def plainly(event: Json) -> Json:
    """Return an event or body without nulls and without fields that differ per call."""
    kept: Json = _without_nulls(event)
    for name in ("id", "created", "system_fingerprint"):
        kept.pop(name, None)
    if "usage" in kept:
        kept["usage"] = [kept["usage"].get(name) for name in ("prompt_tokens", "completion_tokens", "total_tokens")]
    for choice in kept.get("choices", ()):
        for call in (choice.get("message") or choice.get("delta") or {}).get("tool_calls", ()):
            if call.get("id", "").startswith("chatcmpl-tool-"):
                call["id"] = "ID"
    return kept


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(current) for name, current in value.items() if current is not None}
    return [_without_nulls(current) for current in value] if isinstance(value, list) else value


def folded(capture: Capture) -> list[Any]:
    """Return what is recorded of every choice, tool-call ids aside."""
    rows = []
    for choice in capture.choices:
        message = choice.message()
        message["tool_calls"] = [
            [c["function"]["name"], c["function"]["arguments"]] for c in message.get("tool_calls") or ()
        ]
        text = {name: message.get(name) or "" for name in ("content", "reasoning")}
        rows.append([text, message["tool_calls"], choice.finish_reason, choice.ids, choice.logprobs])
    return rows


async def compare(
    both: Both, served: str, model: Model, name: str, seed: int, streamed: bool
) -> tuple[bool, bool, str]:
    """Return (what is recorded is equal, every event is equal, the first difference)."""
    body = {
        "model": "m", "seed": seed, "max_tokens": 120, "logit_bias": model.bias, "stream": streamed, **_ONCE,
        "messages": [{"role": "system", "content": "You are an agent"}, {"role": "user", "content": "Find the mail"}],
        **CASES[name],
    }  # fmt: skip
    request = request_body.read(msgspec.json.encode(body))
    plain, plain_record = await received(await both.plain(request, served), request)
    exact, exact_record = await received(await both.exact(request, served), request)
    one, other = sorted_events(plain), sorted_events(exact)
    difference = next((f"{a}\n      {b}" for a, b in zip(one, other, strict=False) if a != b), "")
    same = folded(plain_record) == folded(exact_record) and plain_record.prompt_ids == exact_record.prompt_ids
    if not same:
        rows = zip(folded(plain_record), folded(exact_record), strict=False)
        difference = next((f"{a[:3]}\n      {b[:3]}" for a, b in rows if a != b), difference)
    return same, one == other, difference


def sorted_events(events: Sequence[Json]) -> list[Json]:
    """Return events by choice: choices of one call come in any order."""
    plain = [plainly(event) for event in events]
    return sorted(plain, key=lambda e: e["choices"][0]["index"] if len(e.get("choices", ())) == 1 else 99)


async def equality(both: Both, served: str, model: Model, seeds: int, verbose: bool) -> None:
    """Print how many of the answers are equal, by case."""
    print(f"\n{served}: of {seeds} seeds\n{'case':26} whole  recorded alike, streamed  every event alike, streamed")
    for name in CASES:
        wholes = [await compare(both, served, model, name, seed, False) for seed in range(seeds)]
        streams = [await compare(both, served, model, name, seed, True) for seed in range(seeds)]
        print(
            f"{name:26} {sum(same and equal for same, equal, _ in wholes):5}  {sum(same for same, _, _ in streams):24}"
            f"  {sum(equal for _, equal, _ in streams):27}",
            flush=True,
        )
        if verbose:
            for kind, rows in (("whole", wholes), ("streamed", streams)):
                for seed, (same, equal, difference) in enumerate(rows):
                    if not (same and equal):
                        print(f"   {kind} seed {seed}: {difference[:1500]}")


@dataclass(frozen=True)
class Timed:
    """One stream: seconds to its first byte and to its end, and its number of events."""

    first: float
    all: float
    events: int


async def timed(both: Both, request: ChatRequest, served: str, exact: bool) -> Timed:
    """Stream one answer."""
    started, first, events = time.perf_counter(), 0.0, 0
    answer = await (both.exact(request, served) if exact else both.plain(request, served))
    try:
        async for piece in answer.pieces():
            first = first or time.perf_counter() - started
            events += piece.count(b"data: ")
    finally:
        answer.close()
    return Timed(first, time.perf_counter() - started, events)


async def cost(both: Both, served: str, repeats: int) -> None:
    """Print the cost of streams both ways, sequentially and eight at a time."""
    print("\nstreams, median seconds (plain and exact in turns)")
    for prompt, length, at_once in ((300, 64, 1), (300, 256, 1), (2500, 64, 1), (2500, 256, 1), (300, 128, 8)):
        words = "Find the mail about the picnic in Paris, please. " * (prompt // 18)
        body = {"model": "m", "messages": [{"role": "user", "content": words}], "max_tokens": length, "stream": True}
        request = request_body.read(msgspec.json.encode({**body, "ignore_eos": True, **_TOOLS, "tool_choice": "auto"}))
        rounds: dict[bool, list[float]] = {False: [], True: []}
        firsts: dict[bool, list[float]] = {False: [], True: []}
        events: dict[bool, int] = {}
        for _ in range(repeats):
            for exact in (False, True):
                started = time.perf_counter()
                runs = await asyncio.gather(*(timed(both, request, served, exact) for _ in range(at_once)))
                rounds[exact].append(time.perf_counter() - started)
                firsts[exact] += [run.first for run in runs]
                events[exact] = runs[0].events
        plain, mine = statistics.median(rounds[False]), statistics.median(rounds[True])
        first = [statistics.median(firsts[exact]) for exact in (False, True)]
        print(
            f"prompt {prompt:5} answer {length:4} at once {at_once}: plain {plain:.3f}, exact {mine:.3f}, "
            f"ratio {mine / plain:.2f}; first words {first[0]:.3f}, {first[1]:.3f}; "
            f"events {events[False]}, {events[True]}",
            flush=True,
        )


async def run(url: str, model: Model, seeds: int, repeats: int, verbose: bool) -> None:
    """Measure on a vLLM that serves the model."""
    upstream = Upstream([url])
    await upstream.start()
    try:
        both = Both(url, upstream)
        names = [card["id"] for card in await upstream.models(url)]
        base = next(name for name in names if name.endswith("@0"))
        if "adapted" not in names:
            await upstream.load_adapter(url, "adapted", str(model.adapter))
        for served in (base, "adapted"):
            await equality(both, served, model, seeds, verbose)
        await cost(both, base, repeats)
    finally:
        await upstream.stop()


def main() -> None:
    """Start vLLM with the model that rewrites history, and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--verbose", action="store_true", help="print the first difference of every unequal answer")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make(Path(folder))
        with vllm(model.folder, Path(folder) / "vllm.log", "--reasoning-parser", "qwen3") as url:
            asyncio.run(run(url, model, options.seeds, options.repeats, options.verbose))


if __name__ == "__main__":
    main()
