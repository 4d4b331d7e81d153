"""Preference rows in TRL's own conversational forms: what people and judges said, for trainers of another kind. Pure.

    form         one row                            made of
    ----         -------                            -------
    unpaired     prompt, completion, label (KTO)    an answer that people gave values for
    pairs        prompt, chosen, rejected (DPO)     the best and the worst member of a judged group
    shown        prompt, completion (SFT)           an answer that somebody showed

A completion is always one answer of the agent: what a tool or a user said later never is, so that a trainer puts no
loss on it. What a trajectory as a whole was worth is said of its last answer. Members of a group make a pair only where
everything before their last answers is the same. `tools` is JSON text, and so are the arguments of tool calls.

These rows are text, which a trainer tokenizes anew; the ids that were sampled are the learner's own rows.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ratchet.store.records import Feedback, Transcript

Message = Mapping[str, Any]
Row = dict[str, Any]
Path = Callable[[str], Sequence[Message]]  # from a message's hash to all messages up to and with it

_KEPT = ("role", "content", "name", "tool_calls", "tool_call_id")


@dataclass(frozen=True, slots=True)
class Preferences:
    """Rows, and how many were left out for each reason."""

    rows: list[Row] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)

    def add(self, row: Row | str) -> None:
        """Take a row, or the reason why there is none."""
        if isinstance(row, str):
            self.left_out[row] += 1
        else:
            self.rows.append(row)


def unpaired(transcripts: Iterable[Transcript], path: Path, middle: float = 0.5) -> Preferences:
    """Return a row for every answer that people gave values for; above `middle` it was liked."""
    found = Preferences()
    for member in transcripts:
        for call, value in sorted(_values(member.feedback).items(), key=lambda item: item[0] or ""):
            sample = _sample(_messages(member, call, path), member)
            undecided = "undecided" if value == middle else sample
            found.add(undecided if isinstance(undecided, str) else undecided | {"label": value > middle})
    return found


def pairs(groups: Iterable[Sequence[tuple[Transcript, float]]]) -> Preferences:
    """Return a row for every group of (member, score) whose best and worst can be compared."""
    found = Preferences()
    for group in groups:
        found.add(_pair(sorted(group, key=lambda member: member[1])))
    return found


def shown(transcripts: Iterable[Transcript], path: Path) -> Preferences:
    """Return a row for every answer that somebody showed; of several for one answer the newest."""
    found = Preferences()
    for member in transcripts:
        newest = {said.call_id: said.demonstration for said in member.feedback if said.demonstration}
        for call, text in newest.items():
            sample = _sample(_messages(member, call, path), member)
            answer = [{"role": "assistant", "content": text}]
            found.add(sample if isinstance(sample, str) else sample | {"completion": answer})
    return found


def _pair(ranked: Sequence[tuple[Transcript, float]]) -> Row | str:
    """Return the row of a group, worst member first."""
    if len(ranked) < 2 or ranked[0][1] == ranked[-1][1]:
        return "no best and worst"
    worst, best = (_sample(member.messages, member) for member, _ in (ranked[0], ranked[-1]))
    if isinstance(best, str) or isinstance(worst, str):
        return best if isinstance(best, str) else str(worst)
    if best["prompt"] != worst["prompt"]:
        return "different histories"
    if best["completion"] == worst["completion"]:
        return "equal answers"
    shared = {name: value for name, value in best.items() if name != "completion"}
    return shared | {"chosen": best["completion"], "rejected": worst["completion"]}


def _values(said: Iterable[Feedback]) -> dict[str | None, float]:
    """Return the mean over the sources of their newest values, by call; None is the whole trajectory."""
    newest: dict[str | None, dict[str, float]] = {}
    for one in said:
        if one.value is not None:
            newest.setdefault(one.call_id, {})[one.source] = one.value
    return {call: statistics.fmean(values.values()) for call, values in newest.items()}


def _messages(member: Transcript, call_id: str | None, path: Path) -> Sequence[Message]:
    """Return the messages up to and with the answer of a call, or the last one."""
    if call_id is None:
        return member.messages
    replies = [choice.reply_node for call in member.calls if call.id == call_id for choice in call.choices]
    return path(replies[0]) if replies and replies[0] else ()


def _sample(messages: Sequence[Message], member: Transcript) -> Row | str:
    """Return prompt, completion and tools of the last answer in these messages, or why there is none."""
    last = next((at for at in range(len(messages) - 1, 0, -1) if messages[at].get("role") == "assistant"), None)
    if last is None:
        return "no answer"
    told = [_plain(message) for message in messages[: last + 1]]
    if any(message is None for message in told):
        return "not text alone"
    row: Row = {"prompt": told[:last], "completion": told[last:]}
    return row | {"tools": msgspec.json.encode(member.tools).decode()} if member.tools else row


def _plain(message: Message) -> Row | None:
    """Return a message with its content as one text; None where it holds more than text."""
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content):
            return None
        content = "".join(part["text"] for part in content)
    return {name: message[name] for name in _KEPT if message.get(name) is not None} | {"content": content or ""}
