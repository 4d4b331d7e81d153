"""Diagnosis: every reason why rollouts of a workflow could not be trained. Pure, except for calls of the judge.

It checks attempts at one task as the trainer would: which calls arrived, which tokens may be trained, whether the
attempts differ, whether the judge distinguishes answers, and whether the attempts form a group in time.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ratchet.store.operation_records import Rollout
from ratchet.store.reasons import describe_untrained
from ratchet.store.records import Transcript
from ratchet.store.states import CallState, RolloutState
from ratchet.trainer.judges.judgement import Judge
from ratchet.trainer.judges.quality import LintTranscript, Place
from ratchet.trainer.rows.build_rows import build_rows
from ratchet.trainer.rows.token_row import Roles
from ratchet.trainer.settings.trainer_settings import TrainerSettings
from ratchet.tuner.rollouts.scoring import NO_CALL
from ratchet.tuner.settings import TunerSettings

_MIN_SPREAD = 1e-9
_VALUES_TRIED = 8  # values of the row, tried as answers
_OTHER_ANSWERS = 2  # tried before them


@dataclass(frozen=True, slots=True)
class Reason:
    """Why nothing would be trained, and the remedy; `about` is the step that shows it."""

    about: str
    seen: str
    remedy: str


def rollout_problems(rollouts: Sequence[Rollout]) -> Iterator[Reason]:
    """Yield the failures of the attempts."""
    failures = Counter(one.failure for one in rollouts if one.state is RolloutState.FAILED)
    for failure, times in failures.most_common(3):
        remedy = "fix the workflow: failed rollouts are kept and count as failures"
        yield Reason("rollouts", f"{times} of {len(rollouts)} failed: {failure}", remedy)


def call_problems(transcripts: Sequence[Transcript], task_id: str, alias: str, roles: Roles) -> Iterator[Reason]:
    """Yield why the sampled tokens could not be trained."""
    if not transcripts:
        yield Reason("calls", NO_CALL, "in a program: use OPENAI_BASE_URL and OPENAI_MODEL; see the proxy's log")
    tokens: Counter[str] = Counter()
    trained = 0
    for transcript in transcripts:
        rows = build_rows(transcript.trajectory.id, transcript.calls, 0.0, roles)
        trained += sum(sum(row.mask) for row in rows.rows)
        tokens.update(rows.untrained)
    if transcripts and not trained:
        answered = any(call.state is CallState.ANSWERED for one in transcripts for call in one.calls)
        why = (
            describe_untrained(tokens)
            if tokens
            else "the calls have no sampled token"
            if answered
            else "no call was answered"
        )
        yield Reason("tokens", f"no sampled token could be trained: {why}", "see docs/training.md")
    yield from _trajectory_problems(transcripts, task_id, alias)
    if len(transcripts) > 1 and trained and len({_sampled(one) for one in transcripts}) == 1:
        remedy = "sample at temperature 1.0 without a seed: equal attempts have no learning signal"
        yield Reason("attempts", f"all {len(transcripts)} attempts sampled the same tokens", remedy)


def _trajectory_problems(transcripts: Sequence[Transcript], task_id: str, alias: str) -> Iterator[Reason]:
    """Yield why the trajectories would not be grouped as attempts at one task."""
    runs = [one.trajectory for one in transcripts]
    for other in sorted({run.alias for run in runs} - {alias}):
        yield Reason("calls", f"the agent requested {other!r}, but {alias!r} is trained", "use the given model")
    if any(run.task != task_id for run in runs):
        remedy = "give --store the proxy's store, or --proxy the proxy that uses this one"
        yield Reason("calls", "the proxy does not know the rollouts: it uses another store", remedy)


def _sampled(transcript: Transcript) -> tuple[bytes, ...]:
    return tuple(choice.token_ids for call in transcript.calls for choice in call.choices)


def judge_problems(judge: Judge | None, transcript: Transcript | None) -> Iterator[Reason]:
    """Yield why a judge gives no signal: none is set, or it gives every answer the same score."""
    if judge is None:
        yield Reason("judge", "no judge is set: nothing is trained", "give --judge module:function, or a YAML file")
        return
    if transcript is None:
        return
    answers = _answers(transcript)
    stage = LintTranscript(transcript, Place(), "")
    members = [transcript, *(stage.answered(answer, number) for number, answer in enumerate(answers))]
    if transcript.tools:
        tried = enumerate(answers[_OTHER_ANSWERS:], len(answers))
        members += [_answered_by_tools(stage, answer, number) for number, answer in tried]
    scores = {verdict.score for verdict in judge.judge(None, members).verdicts if verdict.score is not None}
    if len(scores) == 1:
        seen = f"{judge.name} gave {scores.pop():g} to the answer, to an empty answer and to every value of the row"
        yield Reason(
            "judge", seen, "make it distinguish right from wrong answers; `ratchet judge lint` tests more cases"
        )


def _answers(transcript: Transcript) -> list[str]:
    """Return answers that a judge should distinguish from the original: empty, nonsense, and the row's values."""
    row: Mapping[str, Any] = transcript.row or {}
    values = [value for value in row.values() if value not in (None, "")][:_VALUES_TRIED]
    return ["", "xyzzy", *(value if isinstance(value, str) else json.dumps(value) for value in values)]


def _answered_by_tools(stage: LintTranscript, answer: str, number: int) -> Transcript:
    """Return the transcript of an agent that answers at once, with the answer as every text argument of its tools."""
    transcript = stage.answered(answer, number)
    prompt = [message for message in transcript.messages if message.get("role") in ("system", "developer", "user")]
    calls = [
        {"id": f"call_{place}", "type": "function", "function": {"name": name, "arguments": json.dumps(dict(given))}}
        for place, tool in enumerate(transcript.tools)
        if (name := _function(tool).get("name"))
        and (given := [(text, answer) for text in _text_parameters(_function(tool))])
    ]
    message = (
        {"role": "assistant", "content": None, "tool_calls": calls} if calls else {"role": "assistant", "content": ""}
    )
    return msgspec.structs.replace(transcript, messages=(*prompt, message))


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tool's definition, with or without the wrapping of the dialect."""
    inner = tool.get("function", tool)
    return inner if isinstance(inner, Mapping) else {}


def _text_parameters(function: Mapping[str, Any]) -> list[str]:
    """Return the names of a function's string parameters."""
    schema = function.get("parameters") or function.get("input_schema") or {}
    known = schema.get("properties") if isinstance(schema, Mapping) else None
    properties = known if isinstance(known, Mapping) else {}
    return [name for name, kind in properties.items() if isinstance(kind, Mapping) and kind.get("type") == "string"]


def score_problems(rollouts: Sequence[Rollout]) -> Iterator[Reason]:
    """Yield why the scores of the attempts have no learning signal."""
    failures = Counter(one.judge_failure for one in rollouts if one.judge_failure is not None)
    for failure, times in failures.most_common(3):
        if failure != NO_CALL:  # reported by call_problems
            remedy = "fix the judge: a failure is never a score"
            yield Reason("judge", f"it failed on {times} of {len(rollouts)} attempts: {failure}", remedy)
    scores = [one.score for one in rollouts if one.score is not None]
    if len(scores) > 1 and max(scores) - min(scores) < _MIN_SPREAD:
        seen = f"all {len(scores)} attempts scored {scores[0]:g}: a group with equal scores has no learning signal"
        yield Reason(
            "scores", seen, "try another task, or more --attempts; use tasks that are neither always solved nor never"
        )


def setting_problems(trainer: TrainerSettings, tuner: TunerSettings, seconds: float) -> Iterator[Reason]:
    """Yield why attempts of this duration (seconds) would not form a group."""
    waits = trainer.num_generations / tuner.concurrency * seconds
    if waits > trainer.group_wait_seconds:
        seen = (
            f"{trainer.num_generations} attempts (trainer.num_generations) of {seconds:.0f} s, "
            f"{tuner.concurrency} at a time, "
            f"take {waits:.0f} s, and a group waits {trainer.group_wait_seconds:g} s"
        )
        yield Reason(
            "groups", seen, "raise --concurrency or trainer.group_wait_seconds, or lower trainer.num_generations"
        )
    if tuner.max_failures == 0:
        yield Reason("settings", "tuner.max_failures 0 stops at the first failed rollout", "raise it, or remove it")
