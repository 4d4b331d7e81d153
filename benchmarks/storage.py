"""What a recorded trajectory costs on disk, beside the least that it can: its final transcript, its ids, its logprobs.

An agent of 40 turns sends its whole history with every call. The trajectories go into an empty store of each kind as
the proxy ships them; then the database's own size is divided. `overhead` is (database - ids - logprobs) / transcript:
the aim is 1.5. Ids and logprobs count four bytes per token, the transcript as the JSON of its messages.

    python -m benchmarks.storage [--trajectories 50] [--turns 40] [--forks] [--store URL] [--json]
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from ratchet.store.content.messages import link_key, node, tool_call_ids, tools_hash
from ratchet.store.db.engine import connect
from ratchet.store.ids import new_id
from ratchet.store.records import CallEnded, CallStarted, Choice, MessageNode, Shipment, pack_ids, pack_logprobs
from ratchet.store.states import CallState
from ratchet.store.store import open_store
from tests.harness.postgres import postgres

ROOT = Path(__file__).parents[1]
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": f"{name} something", "parameters": {"type": "object"}},
    }
    for name in ("search", "read", "answer")
]
_SAMPLING = {"temperature": 1.0, "max_tokens": 512, "top_p": 1.0}


@dataclass(frozen=True)
class Size:
    """One store after the run, in bytes, per trajectory."""

    kind: str
    database: float
    transcript: float
    ids: float  # of the last call's context, and of what was sampled and is not in it
    logprobs: float

    @property
    def overhead(self) -> float:
        """What the transcript costs, in times its own size, when ids and logprobs cost what they must."""
        return (self.database - self.ids - self.logprobs) / self.transcript


class Writer:
    """Words with the frequencies of this project's own documents, and the tokens that they would be."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        text = " ".join(path.read_text() for path in sorted(ROOT.glob("docs/*.md")))
        self._words = re.findall(r"[A-Za-z]+[.,]?", text)

    def prose(self, size: int) -> str:
        """Return about `size` characters."""
        words: list[str] = []
        while size > 0:
            at = self._random.randrange(len(self._words) - 3)
            words += self._words[at : at + 3]  # phrases, not single words: real text repeats itself
            size -= sum(len(word) + 1 for word in words[-3:])
        return " ".join(words)

    def tokens(self, text: str) -> list[int]:
        """Return ids as a tokenizer gives them: one for about four characters, the frequent ones small."""
        return [min(151_000, int(self._random.paretovariate(0.25))) for _ in range(max(1, len(text) // 4))]

    def logprobs(self, count: int) -> list[float]:
        """Return logprobs as a model gives them: most near 0."""
        return [-self._random.expovariate(3.0) for _ in range(count)]

    def result(self) -> str:
        """Return what a tool says: three hits as JSON."""
        hits = [
            {
                "id": self._random.getrandbits(40),
                "from": self.prose(16),
                "subject": self.prose(30),
                "snippet": self.prose(180),
            }
            for _ in range(3)
        ]
        return json.dumps(hits)

    def call(self) -> dict[str, Any]:
        """Return an assistant's message with a short thought and a tool call."""
        function = {"name": "search", "arguments": json.dumps({"query": self.prose(30), "limit": 3})}
        name = f"chatcmpl-tool-{self._random.getrandbits(128):032x}"
        called = {"id": name, "type": "function", "function": function}
        return {"role": "assistant", "content": self.prose(120), "tool_calls": [called]}


def trajectory(writer: Writer, turns: int, forks: bool, at: float) -> Iterator[list[Shipment]]:
    """Yield the records of each call of one agent run."""
    name, tools = tools_hash(TOOLS)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You find messages. " + SYSTEM},
        {"role": "user", "content": writer.prose(120)},
    ]
    nodes: list[MessageNode] = []
    keys: list[str] = []
    _follow(nodes, keys, messages)
    new, fresh = list(nodes), writer.tokens(SYSTEM + str(messages[1]["content"]))
    whole: list[int] = []
    parent = None
    run = new_id("traj")
    for turn in range(turns):
        started_at = at + 3.0 * turn
        prompt = [*whole, *fresh]
        start = CallStarted(
            call_id=new_id("call"), trajectory_id=run, started_at=started_at, alias="mail", version=3, dialect="chat",
            streamed=True, linked_by="graph" if parent else "root", prompt_node=nodes[-1].hash, tools_hash=name,
            tools=tools if turn == 0 else b"", parent_call=parent, key_id="0123456789abcdef", task=None,
            sampling=_SAMPLING, nodes=tuple(new),
        )  # fmt: skip
        reply = writer.call() if turn < turns - 1 else {"role": "assistant", "content": writer.prose(300)}
        answer = node(nodes[-1].hash, reply)
        sampled = writer.tokens(json.dumps(reply))
        choice = Choice(
            index=0, finish_reason="tool_calls", token_ids=pack_ids(sampled),
            logprobs=pack_logprobs(writer.logprobs(len(sampled))), reply_node=answer.hash,
            link_key=link_key(keys[-1], reply), tool_call_ids=tool_call_ids(reply),
        )  # fmt: skip
        kind = "root" if parent is None else "fork" if forks else "exact"
        ended = CallEnded(
            start=start, state=CallState.ANSWERED, ended_at=started_at + 1.25, status=200, context=kind,
            prompt_ids=pack_ids(fresh if kind == "exact" else prompt), prompt_tokens=len(prompt),
            completion_tokens=len(sampled), first_byte_at=started_at + 0.21, choices=(choice,),
            upstream="http://127.0.0.1:8001", nodes=(answer,),
        )  # fmt: skip
        yield [start, ended]
        result = {"role": "tool", "content": writer.result(), "tool_call_id": (choice.tool_call_ids or ("",))[0]}
        _follow(nodes, keys, [reply, result])
        new, fresh = [nodes[-1]], writer.tokens(str(result["content"]))
        whole = [*prompt, *(writer.tokens(json.dumps(reply)) if forks else sampled)]
        parent = start.call_id


SYSTEM = Writer(0).prose(1500)


def _follow(nodes: list[MessageNode], keys: list[str], messages: list[dict[str, Any]]) -> None:
    for message in messages:
        nodes.append(node(nodes[-1].hash if nodes else "", message))
        keys.append(link_key(keys[-1] if keys else "", message))


def measure(url: str, trajectories: int, turns: int, forks: bool) -> Size:
    """Fill an empty store and measure it."""
    store, writer = open_store(url), Writer(1)
    empty = database_bytes(url)
    transcript = ids = logprobs = 0
    for number in range(trajectories):
        batch: list[Shipment] = []
        context = 0
        for records in trajectory(writer, turns, forks, 1.7e9 + 100.0 * number):
            batch += records
            end = records[-1]
            assert isinstance(end, CallEnded)
            context = len(end.prompt_ids) + (context if end.context == "exact" else 0)
            ids += sum(len(choice.token_ids) for choice in end.choices)
            logprobs += sum(len(choice.logprobs) for choice in end.choices)
            transcript += sum(len(one.body) for one in (*end.start.nodes, *end.nodes))
        ids += context
        store.calls.ship(batch)
    store.close()
    kind = sa.make_url(url).get_backend_name()
    return Size(
        kind, (database_bytes(url) - empty) / trajectories, *(n / trajectories for n in (transcript, ids, logprobs))
    )


def database_bytes(url: str) -> int:
    """Return what the database takes: its pages that are in use."""
    engine = connect(url)
    with engine.connect() as connection:
        if engine.dialect.name == "sqlite":
            used = (
                "SELECT (SELECT page_count FROM pragma_page_count) - (SELECT freelist_count FROM pragma_freelist_count)"
            )
            size = int(connection.exec_driver_sql(used).scalar() or 0)
            size *= int(connection.exec_driver_sql("PRAGMA page_size").scalar() or 0)
        else:
            size = int(connection.exec_driver_sql("SELECT pg_database_size(current_database())").scalar() or 0)
    engine.dispose()
    return size


def main() -> None:
    """Print one line per database; fail where the aim is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=50)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--forks", action="store_true", help="every call renders its history again")
    parser.add_argument("--store", help="an empty database; without it, SQLite and a PostgreSQL of its own")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sizes: list[Size] = []
    with tempfile.TemporaryDirectory() as folder:
        if options.store:
            sizes.append(measure(options.store, options.trajectories, options.turns, options.forks))
        else:
            sizes.append(measure(f"sqlite:///{folder}/store.db", options.trajectories, options.turns, options.forks))
            with postgres() as url:
                sizes.append(measure(url, options.trajectories, options.turns, options.forks))
    if options.json:
        print(json.dumps([asdict(size) | {"overhead": size.overhead} for size in sizes]))
    else:
        print(
            f"{'KB per trajectory':12} {'database':>10} {'transcript':>11} {'ids':>8} {'logprobs':>9} {'overhead':>9}"
        )
        for size in sizes:
            parts = (size.database, size.transcript, size.ids, size.logprobs)
            cells = " ".join(f"{part / 1000:>{width}.1f}" for part, width in zip(parts, (15, 11, 8, 9), strict=True))
            print(f"{size.kind:12} {cells} {size.overhead:9.2f}")
    sys.exit(0 if all(size.overhead <= 1.5 for size in sizes) else 1)


if __name__ == "__main__":
    main()
