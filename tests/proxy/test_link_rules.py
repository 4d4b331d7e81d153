"""The linker finds what a plain search over all answers finds by the same rules, in random conversations.

Texts are too short to be quoted: `test_quotes.py` compares quotes with a plain search.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from ratchet.proxy.coordinator.linking.linker import TrajectoryLinker
from ratchet.proxy.messages.link_records import Leaf, Link
from ratchet.proxy.messages.text_fingerprints import fingerprints_of, is_distinctive_id, short_key
from ratchet.store.content import messages as canon
from tests.proxy.test_linking import Message, evidence

Found = tuple["KnownAnswer | None", str]


@dataclass(eq=False)
class KnownAnswer:
    """A known answer; `run` is its trajectory, `path` and `gap` are the keys at which the graph has it."""

    run: str
    call: int
    choice: int
    message: Message
    path: str
    gap: str
    extended: bool = False
    taken: bool = False

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of its tool calls."""
        return canon.tool_call_ids(self.message)


class PlainSearch:
    """All answers, oldest first, and the rules."""

    def __init__(self) -> None:
        self.answers: list[KnownAnswer] = []

    def find(self, messages: Sequence[Message]) -> Found:
        """Return the answer that a request continues, and by what rule."""
        keys = canon.link_keys(messages)
        for place in reversed(range(len(messages))):
            at_path = [one for one in self.answers if keys[place] in (one.path, one.gap)]
            if messages[place]["role"] != "assistant" or not at_path:
                continue
            later, runs = messages[place + 1 :], {one.run for one in at_path}
            if any(one["role"] == "assistant" for one in later):
                found = _by_content(later, [one for one in self.answers if one.run in runs], any_text=True)
                if found[0] is not None:
                    return found
            same_ids = [one for one in at_path if one.ids and one.ids == canon.tool_call_ids(messages[place])]
            exact = [one for one in at_path if one.path == keys[place]]
            equal = same_ids or exact or [one for one in at_path if _may_be(one, messages[place])]
            if not equal:
                continue
            best = max(equal, key=_preference)
            by = "graph" if best.path == keys[place] else "graph+gap"
            return best, "graph+tool_ids" if same_ids and by == "graph" else by
        return _by_content(messages, self.answers, any_text=False)


def _by_content(messages: Sequence[Message], known: Sequence[KnownAnswer], *, any_text: bool) -> Found:
    """Return the latest answer of the one trajectory that gave the messages; `any_text`: short ones count too."""
    matches: list[tuple[list[KnownAnswer], list[KnownAnswer]]] = []
    for message in reversed(messages):
        equal: list[KnownAnswer] = []
        if message["role"] == "assistant":
            equal = [one for one in known if _alone(one.message) == _alone(message) and _may_be(one, message)]
        named = canon.tool_call_ids(message) or (message.get("tool_call_id", ""),)
        called = [one for name in named if is_distinctive_id(name) for one in known if name in one.ids]
        matches += [(called, equal)] if called or equal else []
    for called, _ in matches:
        if len(runs := {one.run for one in called}) == 1:
            return next(one for c, e in matches for one in reversed([*e, *c]) if one.run in runs), "tool_ids"
    groups = [equal for _, equal in matches if equal]
    if not groups:
        return None, ""
    shared = {one.run for one in groups[0]}
    for group in groups:
        shared = shared & {one.run for one in group} or shared
    if not any_text and not any(one.ids for group in groups for one in group if one.run in shared):
        return None, "answer"
    return _choose([one for one in groups[0] if one.run in shared]), "answer"


def _may_be(one: KnownAnswer, message: Message) -> bool:
    """Return whether the ids of the tool calls are equal, or not random."""
    ids = canon.tool_call_ids(message)
    return one.ids in ((), ids) or not any(map(is_distinctive_id, ids))


def _choose(equal: Sequence[KnownAnswer]) -> KnownAnswer | None:
    if len({one.run for one in equal}) == 1:
        return max(equal, key=lambda one: (one.call, -one.choice))
    if len({one.path for one in equal}) > 1:
        return None
    return max([one for one in equal if not one.extended], key=_preference, default=None)


def _preference(one: KnownAnswer) -> tuple[bool, bool, int, int]:
    return not one.taken, not one.extended, one.call, -one.choice


def _alone(message: Message) -> str:
    return canon.link_key(canon.ANYWHERE, message)


def _edited(rng: random.Random, messages: list[Message]) -> list[Message]:
    """Return the conversation as an agent might send it: whole, cut, without its beginning or a message, rewritten."""
    messages, last = [*messages], len(messages) - 1
    way = rng.random()
    if way < 0.1 and last > 1:
        del messages[rng.randrange(2, last + 1) :]
    elif way < 0.2:
        messages[0] = {"role": "system", "content": f"other {rng.randrange(3)}"}
    elif way < 0.3 and last > 1:
        del messages[rng.randrange(1, last)]
    elif way < 0.35:
        messages.append({"role": "user", "content": "reminder"})
    calls = messages[-1].get("tool_calls")
    if calls:
        return messages + [{"role": "tool", "tool_call_id": one["id"], "content": "12"} for one in calls]
    return [*messages, {"role": "user", "content": rng.choice(["go on", "and now?"])}]


def _reply(rng: random.Random, ids: list[str]) -> Message:
    message: dict[str, Any] = {"role": "assistant", "content": rng.choice(["yes", "no", "well"])}
    if rng.random() < 0.5:
        ids.append(f"call_{rng.getrandbits(64):016x}")
        names = rng.choices([ids[-1], "call_0", rng.choice(ids)], weights=[8, 2, 1], k=rng.randrange(1, 3))
        arguments = json.dumps({"a": rng.randrange(3)})
        message["tool_calls"] = [
            {"id": name, "type": "function", "function": {"name": "find", "arguments": arguments}} for name in names
        ]
    return message


def _end(linker: TrajectoryLinker, link: Link, answers: Sequence[KnownAnswer], prompt: list[Message]) -> None:
    linker.end_call(link, [
        Leaf.of(
            one.run, f"call_{one.call}", one.choice, 0, short_key(one.path), one.ids, "k", b"", float(one.call),
            fingerprints=fingerprints_of(one.message, one.gap, _alone(one.message), prompt),
        )
        for one in answers
    ], float(answers[0].call))  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_the_linker_finds_what_a_plain_search_finds(seed: int) -> None:
    rng, plain, linker = random.Random(seed), PlainSearch(), TrajectoryLinker(idle_seconds=1e9)
    conversations: list[list[Message]] = [[{"role": "user", "content": "begin"}]]
    ids, rules = ["call_0"], set[str]()
    for call in range(400):
        prompt = _edited(rng, rng.choice(conversations[-40:])) if rng.random() < 0.9 else conversations[0]
        link = linker.find_link(evidence(prompt))
        parent, by = plain.find(prompt)
        found = link.parent and (link.trajectory_id, link.parent.call_id, link.parent.choice, link.linked_by)
        assert found == (parent and (parent.run, f"call_{parent.call}", parent.choice, by)), (call, prompt)
        rules.add(link.linked_by)
        linker.begin_call(link, "agent", 0, float(call))
        if parent is not None:
            parent.extended = True
            for one in plain.answers:
                one.taken |= one.call == parent.call
        keys, skips = canon.link_keys(prompt), len(prompt) > 1 and prompt[-1]["role"] == "user"
        answers = []
        for choice in range(rng.choice([1, 1, 1, 3])):
            message = _reply(rng, ids)
            gap = canon.link_key(keys[-2], message) if skips else ""
            path = canon.link_key(keys[-1], message)
            answers.append(KnownAnswer(link.trajectory_id, call, choice, message, path, gap))
            conversations.append([*prompt, message])
        _end(linker, link, answers, prompt)
        plain.answers += answers
        if rng.random() < 0.02:
            linker.forget_trajectory(link.trajectory_id)
            plain.answers = [one for one in plain.answers if one.run != link.trajectory_id]
    assert rules == {"root", "graph", "graph+gap", "graph+tool_ids", "tool_ids", "answer"}
