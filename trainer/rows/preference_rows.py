"""Preference rows in TRL's conversational formats, for other trainers. Pure.

    format          one row                            source
    ------          -------                            ------
    unpaired        prompt, completion, label (KTO)    an answer with feedback values
    pairs           prompt, chosen, rejected (DPO)     the best and the worst member of a judged group
    demonstrations  prompt, completion (SFT)           a demonstrated answer

A completion is always one answer of the agent, never a message of a tool or user, so that a trainer puts no loss on
those. Feedback on a whole trajectory counts for its last answer. Members of a group form a pair only if everything
before their last answers is equal. `tools` and the arguments of tool calls are JSON text.

These rows are text; rows with the sampled token ids are in `trajectory_export.py`.
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
Path = Callable[[str], Sequence[Message]]  # message hash -> all messages up to and including it

_MESSAGE_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id")


@dataclass(frozen=True, slots=True)
class Preferences:
    """Rows, and the counts of skipped rows by reason."""

    rows: list[Row] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)

    def add(self, row: Row | str) -> None:
        if isinstance(row, str):
            self.skipped[row] += 1
        else:
            self.rows.append(row)


def unpaired(transcripts: Iterable[Transcript], path: Path, middle: float = 0.5) -> Preferences:
    """Return a row for every answer with feedback values; values above `middle` are positive."""
    preferences = Preferences()
    for member in transcripts:
        for call, value in sorted(_values(member.feedback).items(), key=lambda item: item[0] or ""):
            sample = _sample(_messages(member, call, path), member)
            undecided = "undecided" if value == middle else sample
            preferences.add(undecided if isinstance(undecided, str) else undecided | {"label": value > middle})
    return preferences


def pairs(groups: Iterable[Sequence[tuple[Transcript, float]]]) -> Preferences:
    """Return a row for every group of (member, score) whose best and worst members form a pair."""
    preferences = Preferences()
    for group in groups:
        preferences.add(_pair(sorted(group, key=lambda member: member[1])))
    return preferences


def demonstrations(transcripts: Iterable[Transcript], path: Path) -> Preferences:
    """Return a row for every demonstrated answer; the newest demonstration of an answer counts."""
    preferences = Preferences()
    for member in transcripts:
        newest = {entry.call_id: entry.demonstration for entry in member.feedback if entry.demonstration}
        for call, text in newest.items():
            sample = _sample(_messages(member, call, path), member)
            answer = [{"role": "assistant", "content": text}]
            preferences.add(sample if isinstance(sample, str) else sample | {"completion": answer})
    return preferences


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


def _values(feedback: Iterable[Feedback]) -> dict[str | None, float]:
    """Return the mean of the sources' newest values by call; the key None is the whole trajectory."""
    newest: dict[str | None, dict[str, float]] = {}
    for entry in feedback:
        if entry.value is not None:
            newest.setdefault(entry.call_id, {})[entry.source] = entry.value
    return {call: statistics.fmean(values.values()) for call, values in newest.items()}


def _messages(member: Transcript, call_id: str | None, path: Path) -> Sequence[Message]:
    """Return the messages up to and including the answer of a call; None: the last answer."""
    if call_id is None:
        return member.messages
    replies = [choice.reply_node for call in member.calls if call.id == call_id for choice in call.choices]
    return path(replies[0]) if replies and replies[0] else ()


def _sample(messages: Sequence[Message], member: Transcript) -> Row | str:
    """Return prompt, completion and tools of the last answer in these messages, or the reason why there is none."""
    last = next((at for at in range(len(messages) - 1, 0, -1) if messages[at].get("role") == "assistant"), None)
    if last is None:
        return "no answer"
    plain = [_plain(message) for message in messages[: last + 1]]
    if any(message is None for message in plain):
        return "not text alone"
    row: Row = {"prompt": plain[:last], "completion": plain[last:]}
    return row | {"tools": msgspec.json.encode(member.tools).decode()} if member.tools else row


def _plain(message: Message) -> Row | None:
    """Return a message with its content as one text; None if it has parts other than text."""
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content):
            return None
        content = "".join(part["text"] for part in content)
    return {name: message[name] for name in _MESSAGE_FIELDS if message.get(name) is not None} | {
        "content": content or ""
    }
