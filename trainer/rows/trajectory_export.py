"""Exports recorded trajectories for other tools, with vLLM's token ids, masks and logprobs. Pure.

`trajectory_record` returns one record per trajectory, with its chat, calls and training rows; `training_records` one
per training row in TRL's columns, without measurements and held-out tasks. Every record has all columns, so that
`datasets` infers one type for each. `messages_json` is exact, including images and other parts that chat columns cannot
represent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ratchet.store.records import (
    GATHERED,
    RESAMPLE,
    Call,
    Choice,
    Trajectory,
    Transcript,
    Verdict,
    unpack_ids,
    unpack_logprobs,
)
from ratchet.trainer.errors import RowError
from ratchet.trainer.rows.build_rows import Rows, build_rows
from ratchet.trainer.tasks.held_out import is_set_aside

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
    """Return a trajectory as one record."""
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
