"""What the process that ships the journal spends on a call, by kind of call, beside a store of any size.

    opening     the first call of a trajectory: 2.4 KB of prompt, 380 + 32 tokens
    continuing  calls of agents of 20 turns with tools, 32 agents in turns: a tool's result in, a tool call out
    apart       the same, each end in a later batch than its beginning, as with a model that takes seconds: a
                beginning waits for its end
    twice       the same, but no beginning waits, as if each took longer than that
    history     calls that bring an agent's whole history of 82 messages, 92 KB, each unknown to the store

A journal is made, then carried in pieces as the store_writer carries them, in this process. CPU time, without the
reading of the journal's bounds and the first two pieces. To compare two versions of the code, run them in turns.

    python -m benchmarks.shipping [--calls 6000] [--batch 450] [--stored 0] [--json]
"""

from __future__ import annotations

import argparse
import gc
import random
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from benchmarks import agent_shapes
from benchmarks.storage import Writer, trajectory
from ratchet.proxy.coordinator.shipping.held_beginnings import HeldBeginnings
from ratchet.proxy.coordinator.shipping.store_writer import InProcessWriter, SegmentRange
from ratchet.proxy.coordinator.shipping.writer_process import GC_THRESHOLDS
from ratchet.proxy.journal.segments import MAGIC, frame
from ratchet.store.content.messages import node, path, tools_hash
from ratchet.store.db.engine import connect
from ratchet.store.ids import new_id
from ratchet.store.records import CallEnded, CallStarted, Choice, Shipment, pack_ids, pack_logprobs
from ratchet.store.states import CallState
from ratchet.store.store import Store, open_store

_AGENTS, _TURNS = 32, 20
_LATER = 2  # batches between a beginning and its end, of calls apart
_USER = "Find the message about the budget of the spring meeting. " * 40


def opening(calls: int, seed: int = 1) -> Iterator[list[Shipment]]:
    """Yield the beginning and the end of calls that each begin a trajectory."""
    chance = random.Random(seed)
    system = node("", {"role": "system", "content": "You find messages in a mailbox. " * 45})
    prompt, sampled, logprobs = pack_ids(range(1000, 1380)), pack_ids(range(32)), pack_logprobs([-0.5] * 32)
    for number in range(calls):
        request = node(system.hash, {"role": "user", "content": f"{chance.getrandbits(64)} {_USER}"})
        reply = node(request.hash, {"role": "assistant", "content": f"{chance.getrandbits(64)} " + "word " * 32})
        start = CallStarted(
            call_id=new_id("call"), trajectory_id=new_id("traj"), started_at=1.79e9 + number / 1000, alias="mail",
            version=0, dialect="chat", streamed=False, linked_by="root", prompt_node=request.hash, key_id="key_1",
            sampling={"temperature": 1.0, "max_tokens": 256}, nodes=(system, request) if number == 0 else (request,),
        )  # fmt: skip
        choice = Choice(index=0, finish_reason="stop", token_ids=sampled, logprobs=logprobs, reply_node=reply.hash)
        yield [start, CallEnded(
            start=start, state=CallState.ANSWERED, ended_at=start.started_at + 0.02, status=200, prompt_ids=prompt,
            prompt_tokens=380, completion_tokens=32, choices=(choice,), nodes=(reply,),
            response_id=f"chatcmpl-{chance.getrandbits(128):032x}",
        )]  # fmt: skip


def continuing(calls: int, seed: int = 1) -> Iterator[list[Shipment]]:
    """Yield the beginning and the end of calls of agents that go on, in turns."""
    chance, writer = random.Random(seed), Writer(seed)
    agents: list[Iterator[list[Shipment]]] = []
    for number in range(calls):
        if len(agents) < _AGENTS:
            agents.append(trajectory(writer, _TURNS, forks=False, at=1.79e9 + number))
        agent = chance.choice(agents)
        records = next(agent, None)
        if records is None:
            agents.remove(agent)
        else:
            yield records


def history(calls: int, seed: int = 1) -> Iterator[list[Shipment]]:
    """Yield the beginning and the end of calls whose whole history is new."""
    chance = random.Random(seed)
    name, tools = tools_hash(agent_shapes.tools())
    prompt, sampled, logprobs = pack_ids(range(1000, 24_000)), pack_ids(range(64)), pack_logprobs([-0.5] * 64)
    for number in range(calls):
        nodes = path(agent_shapes.conversation(chance))
        reply = node(nodes[-1].hash, agent_shapes.tool_call(chance))
        start = CallStarted(
            call_id=new_id("call"), trajectory_id=new_id("traj"), started_at=1.79e9 + number / 1000, alias="mail",
            version=0, dialect="chat", streamed=False, linked_by="root", prompt_node=nodes[-1].hash, key_id="key_1",
            sampling={"temperature": 1.0, "max_tokens": 512}, nodes=nodes, tools_hash=name,
            tools=tools if number == 0 else b"",
        )  # fmt: skip
        choice = Choice(index=0, finish_reason="stop", token_ids=sampled, logprobs=logprobs, reply_node=reply.hash)
        yield [start, CallEnded(
            start=start, state=CallState.ANSWERED, ended_at=start.started_at + 0.02, status=200, prompt_ids=prompt,
            prompt_tokens=23_000, completion_tokens=64, choices=(choice,), nodes=(reply,),
        )]  # fmt: skip


def journal(file: Path, pairs: Iterator[list[Shipment]], batch: int, later: int) -> list[int]:
    """Write calls as a segment, ends `later` batches later; return where each piece of about `batch` calls ends."""
    ends: list[Shipment] = []
    bounds: list[int] = []
    with file.open("wb") as segment:
        size = segment.write(MAGIC)
        for number, (start, end) in enumerate(pairs, 1):
            size += segment.write(frame(start))
            ends.append(_as_recorded(end))
            if len(ends) > later * batch:
                size += segment.write(frame(ends.pop(0)))
            if number % batch == 0:
                bounds.append(size)
        size += sum(segment.write(frame(end)) for end in ends)
        return [*bounds, size]


def _as_recorded(end: Shipment) -> CallEnded:
    """Return an end without the messages and tools of its beginning."""
    assert isinstance(end, CallEnded)
    return msgspec.structs.replace(end, start=msgspec.structs.replace(end.start, nodes=(), tools=b""))


def carry(url: str, file: Path, bounds: list[int], *, holds: bool = True) -> dict[str, float]:
    """Carry a segment into a store; return microseconds of CPU per call: in all, and of them in the kernel."""
    held = HeldBeginnings()
    writer_ = InProcessWriter(Store(connect(url, create=False, writes_much=True)))
    at, calls, before = len(MAGIC), 0, resource.getrusage(resource.RUSAGE_SELF)
    for number, bound in enumerate(bounds):
        if number == 2:
            calls, before = 0, resource.getrusage(resource.RUSAGE_SELF)
        while at < bound:
            carried = writer_.write(SegmentRange(str(file), at, bound, holds, held.offsets()))
            held.note(carried, (), 0.0)
            at, calls = carried.offset, calls + len(carried.ended)
    after = resource.getrusage(resource.RUSAGE_SELF)
    kernel = after.ru_stime - before.ru_stime
    return {"us": 1e6 * (after.ru_utime - before.ru_utime + kernel) / calls, "kernel": 1e6 * kernel / calls}


def main() -> None:
    """Print one line per kind of call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=6_000)
    parser.add_argument("--batch", type=int, default=450, help="calls in one piece")
    parser.add_argument("--stored", type=int, default=0, help="trajectories that are in the store before")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    kinds = {
        "opening": (opening, 0),
        "continuing": (continuing, 0),
        "apart": (continuing, _LATER),
        "twice": (continuing, _LATER),
        "history": (history, 0),
    }
    found = {}
    for kind, (make, later) in kinds.items():
        with tempfile.TemporaryDirectory() as folder:
            url, file = f"sqlite:///{folder}/store.db", Path(folder) / "journal"
            open_store(url).close()
            if options.stored:
                carry(url, file, journal(file, opening(options.stored, seed=2), 1000, 0))
            few = 10 if make is history else 1  # a call has twenty times as many messages
            bounds = journal(file, make(options.calls // few), options.batch // few, later)
            gc.collect()
            gc.freeze()
            gc.set_threshold(*GC_THRESHOLDS)
            found[kind] = carry(url, file, bounds, holds=kind != "twice")
    if options.json:
        print(msgspec.json.encode(found).decode())
    for kind, one in found.items() if not options.json else ():
        print(f"{kind:12} {one['us']:7.1f} us a call, {one['kernel']:5.1f} of them in the kernel")


if __name__ == "__main__":
    main()
