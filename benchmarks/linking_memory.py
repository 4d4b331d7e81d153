"""How much memory the coordinator's linking takes: open trajectories of tool calls, each linked to the one before.

Every answer is encoded as a worker sends it and decoded as a coordinator reads it: equal values are objects of their
own until the linker shares them. Resident memory counts what the allocator rounds up; beside it stands the linker's
own estimate, by which it keeps its limits.

    python -m benchmarks.linking_memory [--trajectories 10000] [--answers 20] [--json]
"""

from __future__ import annotations

import argparse
import gc
import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import psutil

from benchmarks import agent_shapes
from ratchet.output import progress_bars
from ratchet.proxy.coordinator.linking.linker import TrajectoryLinker
from ratchet.proxy.messages.coordinator_messages import End, encode
from ratchet.proxy.messages.link_records import Leaf, Link, LinkEvidence, token_fingerprint
from ratchet.proxy.messages.text_fingerprints import fingerprints_of, short_key
from ratchet.store.content import messages as canon
from ratchet.store.ids import new_id

_KEY, _ALIAS = "key_1", "agent"
_TOKENS = bytes(4_000)  # packed, of a prompt with its answer
_BEGAN = 1.7e9

_decode = msgspec.msgpack.Decoder(End).decode


@dataclass(frozen=True)
class Memory:
    """What linking holds, in bytes."""

    trajectories: int
    answers: int
    resident: int
    estimated: int

    @property
    def per_answer(self) -> float:
        """Resident bytes for each answer, its share of the trajectory included."""
        return self.resident / self.answers


def _answers(chance: random.Random, answers: int) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the answers of one conversation, each with the link key of the path before it."""
    key = canon.link_keys(agent_shapes.opening(chance))[-1]
    for _ in range(answers):
        answer = agent_shapes.tool_call(chance)
        yield answer, key
        for message in (answer, *agent_shapes.tool_result(chance, answer)):
            key = canon.link_key(key, message)


def _leaf(link: Link, answer: dict[str, Any], before: str, now: float) -> Leaf:
    """Return an answer as a worker makes it."""
    own, anywhere = canon.answer_keys([before, canon.ANYWHERE], answer)
    return Leaf.of(
        link.trajectory_id, new_id("call"), 0, 0, short_key(own), canon.tool_call_ids(answer), _KEY,
        token_fingerprint(_TOKENS), now, fingerprints=fingerprints_of(answer, "", anywhere, []),
    )  # fmt: skip


def _open_trajectory(linker: TrajectoryLinker, chance: random.Random, answers: int, now: float) -> None:
    known: tuple[dict[str, Any], ...] = ()
    keys: tuple[str, ...] = ()
    for number, (answer, before) in enumerate(_answers(chance, answers)):
        evidence = LinkEvidence(_ALIAS, None, known, keys, b"", _KEY, arrived_at=now)
        link = linker.find_link(evidence)
        assert (link.linked_by == "root") == (number == 0), link.linked_by
        linker.begin_call(link, _ALIAS, 0, now)
        ended = _decode(encode(End(number, (_leaf(link, answer, before, now),), now, retryable=False)))
        linker.end_call(link, ended.leaves, now)
        known, keys = (answer,), (canon.link_key(before, answer),)


def measure(trajectories: int, answers: int) -> Memory:
    """Open so many trajectories with so many answers each; return what they take."""
    linker, chance, process = TrajectoryLinker(1e9, 2**40, 2**40), random.Random(1), psutil.Process()
    _open_trajectory(TrajectoryLinker(1e9), random.Random(0), answers, _BEGAN)  # what the first use takes
    with progress_bars() as report_progress:
        report_progress("trajectories", 0, trajectories)
        gc.collect()
        before = process.memory_info().rss
        for number in range(trajectories):
            _open_trajectory(linker, chance, answers, _BEGAN + number)
            report_progress("trajectories", 1, trajectories)
    gc.collect()
    return Memory(trajectories, trajectories * answers, process.memory_info().rss - before, linker.bytes)


def main() -> None:
    """Print the memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=10_000)
    parser.add_argument("--answers", type=int, default=20, help="of each trajectory, with one tool call each")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measure(options.trajectories, options.answers)
    if options.json:
        print(json.dumps(asdict(found) | {"per_answer": found.per_answer}))
        return
    print(
        f"{found.trajectories} trajectories of {options.answers} answers: {found.resident / 2**20:.1f} MB resident, "
        f"{found.per_answer:.0f} bytes an answer; estimated {found.estimated / 2**20:.1f} MB, "
        f"{found.estimated / found.answers:.0f} bytes an answer"
    )


if __name__ == "__main__":
    main()
