"""Trajectories and what rounds did with their answers, as rows for export."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

import msgspec

from ratchet.store.records import (
    GATHERED,
    RESAMPLE,
    AnswerTraining,
    Call,
    Choice,
    Trajectory,
    Transcript,
    Verdict,
    unpack_ids,
    unpack_logprobs,
)
from ratchet.trainer.errors import RowError
from ratchet.trainer.rows.build_rows import AnswerKey, Rows, build_rows
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.tasks import is_set_aside

# AnswerRecords: what a round does with each sampled answer: its advantage and mismatch, or why it carries no loss.

REJECTED = "sequence_mask"  # the learner rejected the whole row: another policy sampled it
_FLOAT16 = 2  # bytes
_LARGEST = 65504.0  # of float16


class AnswerRecords:
    """Collects the answers of a round's rows."""

    def __init__(self) -> None:
        self._answers: dict[tuple[str, tuple[int, ...]], Mapping[AnswerKey, int]] = {}
        self._untrained: dict[AnswerKey, str] = {}

    def add(self, built: Rows) -> None:
        self._untrained |= built.untrained_answers
        for row, answers in zip(built.rows, built.answers, strict=True):
            self._answers[row.trajectory_id, row.ids] = answers

    def leave_out(self, row: TokenRow, reason: str) -> None:
        self._untrained |= dict.fromkeys(self._answers.pop((row.trajectory_id, row.ids), {}), reason)

    def of_round(self, rows: Sequence[TokenRow], mismatch: Sequence[bytes | None]) -> list[AnswerTraining]:
        """Return a record of every answer. `mismatch`: as in RoundReport, of the rows; none if it is shorter."""
        found: list[AnswerTraining] = []
        for place, row in enumerate(rows):
            packed = mismatch[place] if place < len(mismatch) else b""
            if packed is None:
                self.leave_out(row, REJECTED)
            else:
                found += _of_row(row, self._answers.get((row.trajectory_id, row.ids), {}), packed)
        return found + [
            AnswerTraining(call_id=call_id, choice=choice, untrained=reason)
            for (call_id, choice), reason in self._untrained.items()
        ]


def _of_row(row: TokenRow, answers: Mapping[AnswerKey, int], mismatch: bytes) -> Iterator[AnswerTraining]:
    """Yield the records of a row's answers, which begin at these places and carry loss at all their tokens."""
    seen = 0  # trained tokens before the answer
    begins = sorted(answers.items(), key=lambda one: one[1])
    for ((call_id, choice), begin), (_, end) in pairwise([*begins, (("", 0), len(row.ids))]):
        size = sum(row.mask[begin:end])
        advantages = (row.advantage,) * size if row.advantages is None else row.advantages[begin : begin + size]
        yield AnswerTraining(
            call_id=call_id,
            choice=choice,
            advantage=fmean(advantages) if len(set(advantages)) > 1 else advantages[0],
            advantages=_pack(advantages) if len(set(advantages)) > 1 else b"",
            mismatch=mismatch[_FLOAT16 * seen : _FLOAT16 * (seen + size)],
        )
        seen += size


def _pack(values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}e", *(max(-_LARGEST, min(_LARGEST, value)) for value in values))


# Exports recorded trajectories for other tools, with vLLM's token ids, masks and logprobs. Pure.
#
# `trajectory_record` returns one record per trajectory, with its chat, calls and training rows; `training_records` one
# per training row in TRL's columns, without measurements and held-out tasks. Every record has all columns, so that
# `datasets` infers one type for each. `messages_json` is exact, including images and other parts that chat columns
# cannot represent.

TRAINABLE = frozenset({"live", RESAMPLE, GATHERED})  # purposes


@dataclass(frozen=True, slots=True)
class Exported:
    """A trajectory for export; `calls` are those of earlier trajectories that it continues, then its own."""

    transcript: Transcript
    calls: Sequence[Call]
    verdict: Verdict | None
    advantage: float | None  # within its group, if it has one

    def rows(self) -> Rows:
        """Return the training rows; none if the records contradict each other."""
        try:
            return build_rows(self.transcript.trajectory.id, self.calls, self.advantage or 0.0)
        except RowError as error:
            return Rows((), {str(error): sum(call.completion_tokens for call in self.transcript.calls)})


def trajectory_record(one: Exported) -> dict[str, Any]:
    run, verdict, rows = one.transcript.trajectory, one.verdict, one.rows()
    return {
        "id": run.id,
        "alias": run.alias,
        "version": run.version,
        "state": str(run.state),
        "purpose": run.purpose,
        "task": run.task or "",
        "group_id": run.group_id or "",
        "round_id": run.round_id or "",
        "drop_reason": run.drop_reason or "",
        "opened_at": run.opened_at,
        "last_active_at": run.last_active_at,
        "score": verdict.score if verdict else None,
        "advantage": one.advantage,
        "judge": verdict.judge if verdict else "",
        "judge_version": verdict.judge_version if verdict else "",
        "explanation": verdict.explanation if verdict else "",
        "messages": [chat(message) for message in one.transcript.messages],
        "tools": _json(one.transcript.tools),
        "messages_json": _json(one.transcript.messages),
        "rows": [
            {
                "input_ids": list(row.ids),
                "mask": list(row.mask),
                "logprobs": list(row.logprobs),
                "temperature": row.temperature,
                "importance": row.importance and row.truncation is None,
            }
            for row in rows.rows
        ],
        "untrained": _json(rows.untrained),
        "calls": [_call(call) for call in one.transcript.calls],
    }


def why_no_rows(run: Trajectory, held_out: float) -> str | None:
    """Return why a trajectory has no training rows, if so. `held_out` is trainer.release.held_out_share."""
    if run.purpose not in TRAINABLE:
        return "measurements (purpose eval or other)"
    return "of held-out tasks (trainer.release.held_out_share)" if is_set_aside(run, held_out) else None


def training_records(one: Exported, held_out: float = 0.0) -> Iterator[dict[str, Any]]:
    """Yield the training rows of a trajectory in TRL's columns; both masks mark the sampled tokens.

    Yields none for measurements, held-out tasks and models that are not trained here.
    """
    run = one.transcript.trajectory
    if why_no_rows(run, held_out):
        return
    for row in one.rows().rows:
        yield {
            "trajectory_id": run.id,
            "alias": run.alias,
            "version": run.version,
            "purpose": run.purpose,
            "task": run.task or "",
            "input_ids": list(row.ids),
            "completion_mask": list(row.mask),
            "assistant_masks": list(row.mask),
            "logprobs": list(row.logprobs),
            "temperature": row.temperature,
            "importance": row.importance and row.truncation is None,
            "score": one.verdict.score if one.verdict else None,
            "advantage": one.advantage,
        }


def chat(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message in the format of chat templates, with all fields as text."""
    calls = message.get("tool_calls")
    return {
        "role": str(message.get("role") or ""),
        "content": _text(message.get("content")),
        "reasoning_content": _text(message.get("reasoning") or message.get("reasoning_content")),
        "name": _text(message.get("name")),
        "tool_call_id": _text(message.get("tool_call_id")),
        "tool_calls": [_tool_call(call) for call in calls if isinstance(call, dict)] if isinstance(calls, list) else [],
    }


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    arguments = function.get("arguments")
    return {
        "id": _text(call.get("id")),
        "type": "function",
        "function": {
            "name": _text(function.get("name")),
            "arguments": arguments if isinstance(arguments, str) else _json(arguments),
        },
    }


def _call(call: Call) -> dict[str, Any]:
    return {
        "id": call.id,
        "state": str(call.state),
        "dialect": call.dialect,
        "linked_by": call.linked_by,
        "parent_call": call.parent_call or "",
        "parent_choice": call.parent_choice,
        "context": call.context,
        "sampling": _json(call.sampling),
        "untrainable": call.untrainable or "",
        "started_at": call.started_at,
        "ended_at": call.ended_at,
        "prompt_ids": list(unpack_ids(call.prompt_ids)),
        "answers": [_answer(choice) for choice in call.choices],
    }


def _answer(choice: Choice) -> dict[str, Any]:
    return {
        "index": choice.index,
        "finish_reason": choice.finish_reason or "",
        "token_ids": list(unpack_ids(choice.token_ids)),
        "logprobs": list(unpack_logprobs(choice.logprobs)),
    }


def _text(value: Any) -> str:
    """Return text unchanged, content parts as their text, and other values as JSON."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list):
        return "".join(str(part.get("text") or "") for part in value if isinstance(part, dict))
    return _json(value)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
