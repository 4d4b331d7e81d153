"""What the proxy computes for a call of the kinds that agents make, without sockets, disk and HTTP.

    short          4 KB, a new conversation
    own            92 KB: 40 turns of tool calls with code, 20 tools; its answers are this proxy's; 6 agents in turns
    own, many      the same, 200 agents in turns
    foreign, again 92 KB whose answers are not this proxy's; its messages were read before
    foreign, new   the same, never read before
    judge          a prompt of 100 KB JSON, beside 4,000 answers of the same key
    rollouts       4 KB, beside 4,000 answers that begin alike
    long context   4 KB, an answer with 100,000 prompt ids

Microseconds of CPU time of one thread, median: reading the body within its bounds, linking and begin record, the body
for vLLM, capturing the answer, end record and linking. To compare two versions of the code, run them in turns.

    python -m benchmarks.agent_calls [--calls 60] [--only own judge] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks import agent_shapes, wire_upstream
from benchmarks.agent_shapes import Json
from ratchet.proxy.coordinator.linking.linker import TrajectoryLinker
from ratchet.proxy.dialects.chat import Chat
from ratchet.proxy.journal.segments import frame
from ratchet.proxy.messages.link_records import AttemptKey, LinkEvidence, Placement
from ratchet.proxy.settings import ProxySettings
from ratchet.proxy.telemetry.metrics import ProxyMetrics
from ratchet.proxy.worker.call.active_call import ANSWERED, ActiveCall
from ratchet.proxy.worker.call.recorder import Recorder
from ratchet.store.ids import new_id
from ratchet.store.records import CallStarted

STEPS = ("read", "begin", "outgoing", "capture", "end")
OPEN_ANSWERS = 4_000
QUICK_CALLS = 6

Step = tuple[list[Json], list[Json] | None]  # messages and tools of a call
_numbers = itertools.count(1)


class _EncodingJournal:
    """A journal that encodes its records and writes them nowhere."""

    records_lost = 0

    def write(self, record: Any) -> None:
        frame(record)

    def commit(self, record: Any) -> asyncio.Future[bool]:
        frame(record)
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        done.set_result(True)
        return done


@dataclass
class CallTimes:
    """The microseconds of each call by step."""

    name: str
    calls: list[list[float]] = field(default_factory=list)
    body: int = 0  # bytes of the last one

    def median(self) -> dict[str, float]:
        """Return the median by step, and of their sum."""
        parts = {
            name: statistics.median(column) for name, column in zip(STEPS, zip(*self.calls, strict=True), strict=True)
        }
        return parts | {"all": statistics.median(map(sum, self.calls))}


class CallPath:
    """The parts of the proxy that compute, connected as for a call."""

    def __init__(self) -> None:
        settings = ProxySettings(
            store="sqlite://", journal="unused", model="tiny-base", upstreams=["http://127.0.0.1:1"]
        )
        self._chat = Chat(settings.bounds)
        self._linker = TrajectoryLinker(1e9)
        self._recorder = Recorder(_EncodingJournal(), ProxyMetrics(), strict=True)  # type: ignore[arg-type]

    async def call(self, body: bytes, answer: bytes, key_id: str = "key_1") -> list[float]:
        """Make one call; return the microseconds of its steps."""
        marks = [time.thread_time_ns()]
        parsed = await self._chat.read(body, key_id)
        request = parsed.request
        marks.append(time.thread_time_ns())
        now = time.time()
        attempt = AttemptKey("agent", key_id, parsed.prompt_node, request.tools_hash)
        evidence = LinkEvidence(
            "agent", None, request.messages, parsed.keys, request.answer_digests, key_id,
            attempt=attempt, arrived_at=now,
        )  # fmt: skip
        link = self._linker.find_link(evidence)
        self._linker.begin_call(link, "agent", 0, now)
        start = CallStarted(
            call_id=new_id("call"), trajectory_id=link.trajectory_id, started_at=now, alias="agent", version=0,
            dialect="chat", streamed=False, linked_by=link.linked_by, prompt_node=attempt.prompt_node,
            tools_hash=request.tools_hash, parent_call=link.parent.call_id if link.parent else None, key_id=key_id,
            sampling=request.sampling,
        )  # fmt: skip
        placement = Placement("agent", 0, link, attempt, now, None, None)
        open_call = self._recorder.record_begin(parsed, placement, start)
        call = ActiveCall(request, open_call, parsed.make_encoder(start), b"", 0.0)
        marks.append(time.thread_time_ns())
        request.outgoing("tiny-base")
        marks.append(time.thread_time_ns())
        call.encoder.whole(answer)
        marks.append(time.thread_time_ns())
        leaves, _ = self._recorder.record_end(call, ANSWERED, 200)
        self._linker.end_call(link, leaves, time.time())
        marks.append(time.thread_time_ns())
        await asyncio.sleep(0)  # the journal's callbacks
        return [(after - before) / 1000 for before, after in itertools.pairwise(marks)]


def vllm_answer(message: Json, prompt_tokens: int = wire_upstream.PROMPT_TOKENS) -> bytes:
    """Return vLLM's response with this message."""
    whole = json.loads(wire_upstream.whole(prompt_tokens, wire_upstream.TOKENS))
    whole["choices"][0]["message"] |= message
    return json.dumps(whole, separators=(",", ":")).encode()


def _text() -> Json:
    return {"role": "assistant", "content": f"{next(_numbers):08d}" + "w01 " * wire_upstream.TOKENS}


async def _short(path: CallPath, row: CallTimes, calls: int, chance: random.Random) -> None:
    for _ in range(calls):
        await _measure(path, row, (agent_shapes.short_prompt(chance), None), _text())


async def _own(path: CallPath, row: CallTimes, calls: int, chance: random.Random, agents: int) -> None:
    """Agents in turns; the last ones of their calls are measured."""
    offered = agent_shapes.tools()
    conversations = [agent_shapes.opening(chance) for _ in range(agents)]
    measured = max(1, calls // agents)
    for turn in range(agent_shapes.TURNS):
        for messages in conversations:
            answer = agent_shapes.tool_call(chance)
            row_ = row if turn >= agent_shapes.TURNS - measured and len(row.calls) < calls else CallTimes("")
            await _measure(path, row_, (messages, offered), answer)
            messages += [answer, *agent_shapes.tool_result(chance, answer)]


async def _foreign(path: CallPath, row: CallTimes, calls: int, chance: random.Random, *, again: bool) -> None:
    """Each call is another conversation, or one more turn of one whose answers another server gave."""
    offered = agent_shapes.tools()
    await _fill(path, chance, lambda: agent_shapes.tool_call(chance), 10 * calls)
    messages = agent_shapes.conversation(chance, agent_shapes.TURNS - 6)
    for number in range(calls):
        if not again or number % 6 == 0:
            messages = agent_shapes.conversation(chance, agent_shapes.TURNS - 6 * again)
        if again:
            await path.call(agent_shapes.body(messages, offered), vllm_answer(_text()))
            answer = agent_shapes.tool_call(chance)
            messages += [answer, *agent_shapes.tool_result(chance, answer)]
        await _measure(path, row, (messages, offered), _text())


async def _judge(path: CallPath, row: CallTimes, calls: int, chance: random.Random) -> None:
    await _fill(path, chance, lambda: agent_shapes.tool_call(chance), _open_answers(calls))
    for _ in range(calls):
        await _measure(path, row, (agent_shapes.judge_prompt(chance), None), _text())


async def _rollouts(path: CallPath, row: CallTimes, calls: int, chance: random.Random) -> None:
    """The answers of one policy at one task begin alike; prompts hold such a beginning, too."""
    alike = "To find the message I first list the folders, then I search each of them. " * 3

    def answer() -> Json:
        return {"role": "assistant", "content": f"{alike}{chance.getrandbits(64)}"}

    await _fill(path, chance, answer, _open_answers(calls))
    for _ in range(calls):
        messages = agent_shapes.short_prompt(chance)
        messages[1]["content"] += f"\nAn attempt: {alike}"
        await _measure(path, row, (messages, None), answer())


async def _long_context(path: CallPath, row: CallTimes, calls: int, chance: random.Random) -> None:
    answer = vllm_answer(_text(), prompt_tokens=100_000)
    for _ in range(min(calls, 20)):
        row.calls.append(await path.call(agent_shapes.body(agent_shapes.short_prompt(chance)), answer))
    row.body = len(answer)


def _open_answers(calls: int) -> int:
    return OPEN_ANSWERS if calls > QUICK_CALLS else 400


async def _fill(path: CallPath, chance: random.Random, answer: Callable[[], Json], count: int) -> None:
    """Open trajectories with one answer each."""
    for _ in range(count):
        await path.call(agent_shapes.body(agent_shapes.opening(chance)), vllm_answer(answer()))


async def _measure(path: CallPath, row: CallTimes, step: Step, answer: Json) -> None:
    body = agent_shapes.body(*step)
    row.calls.append(await path.call(body, vllm_answer(answer)))
    row.body = len(body)


ROWS: dict[str, Callable[..., Any]] = {
    "short": _short,
    "own": partial(_own, agents=6),
    "own, many": partial(_own, agents=200),
    "foreign, again": partial(_foreign, again=True),
    "foreign, new": partial(_foreign, again=False),
    "judge": _judge,
    "rollouts": _rollouts,
    "long context": _long_context,
}


def run(names: list[str], calls: int) -> Iterator[CallTimes]:
    """Measure each kind of call with a fresh path."""
    for name in names:
        row = CallTimes(name)
        gc.collect()
        gc.freeze()
        asyncio.run(ROWS[name](CallPath(), row, calls, random.Random(name)))
        yield row


def main() -> None:
    """Print one line per kind of call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=60, help="measured calls of each kind")
    parser.add_argument("--only", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--quick", action="store_true", help="6 calls of each kind, without `own, many`")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    names = [name for name in options.only if not (options.quick and name == "own, many")]
    rows = list(run(names, QUICK_CALLS if options.quick else options.calls))
    if options.json:
        print(json.dumps([{"name": row.name, "bytes": row.body, "us": row.median()} for row in rows]))
        return
    print(f"{'':16} {'KB':>6}" + "".join(f"{name:>10}" for name in (*STEPS, "all")))
    for row in rows:
        print(f"{row.name:16} {row.body / 1000:6.0f}" + "".join(f"{us:10,.0f}" for us in row.median().values()))


if __name__ == "__main__":
    main()
