"""Imported calls: token ids and logprobs that a caller sampled, as the records that a proxy would ship. Pure."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ratchet.store.content.messages import node, path
from ratchet.store.ids import new_id
from ratchet.store.records import (
    GATHERED,
    CallEnded,
    CallStarted,
    Choice,
    MessageNode,
    pack_ids,
    pack_logprobs,
)
from ratchet.store.states import CallState
from ratchet.trainer.errors import TuningError
from ratchet.tuner.rollouts.trajectory_groups import SampledCall, ScoredTrajectory

LINKED_BY = "import"
_MAX_ID = 2**31
_LOGPROB_ERROR = 1e-3  # by which rounding may raise a logprob above zero
# In place of a conversation that the caller did not give, or that has another number of answers than calls.
_PROMPT: Mapping[str, Any] = {"role": "prompt", "content": "(imported token ids)"}
_ANSWER: Mapping[str, Any] = {"role": "assistant", "content": "(imported token ids)"}


def check_calls(calls: Sequence[SampledCall], where: str) -> None:
    """Raise TuningError, which names the place, if a call is malformed."""
    for number, call in enumerate(calls):
        place = f"{where}.calls[{number}]"
        if not isinstance(call, SampledCall):
            raise TuningError(f"{place} is {call!r:.100}: give a ratchet.SampledCall")
        for name in ("prompt_token_ids", "token_ids"):
            ids = getattr(call, name)
            if not ids or any(not isinstance(one, int) or not 0 <= one < _MAX_ID for one in ids):
                raise TuningError(f"{place}.{name}: give the engine's token ids, one or more integers from 0")
        if len(call.logprobs) != len(call.token_ids):
            raise TuningError(
                f"{place} has {len(call.token_ids)} token_ids and {len(call.logprobs)} logprobs: give one logprob for "
                "each sampled token, the end token included"
            )
        if any(not math.isfinite(one) or one > _LOGPROB_ERROR for one in call.logprobs):
            raise TuningError(f"{place}.logprobs: a logprob is a finite number of at most 0")


def records_of(
    given: ScoredTrajectory, *, trajectory_id: str, alias: str, version: int, task: str
) -> list[CallStarted | CallEnded]:
    """Return the starts and ends of an imported trajectory's calls.

    A prompt that begins with the prompt and the answer before it, id for id, continues the same sequence; any other one
    is a context of its own.
    """
    turns = _turns(given)
    records: list[CallStarted | CallEnded] = []
    before: tuple[str, list[int]] | None = None  # the call before, and its ids
    now = time.time()
    for number, (call, (prompt_nodes, answer)) in enumerate(zip(given.calls, turns, strict=True)):
        prompt, sampled = list(call.prompt_token_ids), list(call.token_ids)
        exact = before is not None and prompt[: len(before[1])] == before[1]
        start = CallStarted(
            call_id=new_id("call"), trajectory_id=trajectory_id, started_at=now + number * 1e-6, alias=alias,
            version=version, dialect="chat" if given.messages else "completions", streamed=False, linked_by=LINKED_BY,
            prompt_node=prompt_nodes[-1].hash, parent_call=before[0] if before else None, task=task, purpose=GATHERED,
            sampling=dict(call.sampling), nodes=tuple(prompt_nodes),
        )  # fmt: skip
        choice = Choice(
            index=0, finish_reason=call.finish_reason, token_ids=pack_ids(sampled),
            logprobs=pack_logprobs(list(call.logprobs)), reply_node=answer.hash,
        )  # fmt: skip
        end = CallEnded(
            start=start, state=CallState.ANSWERED, ended_at=now + number * 1e-6, status=200,
            context="root" if before is None else "exact" if exact else "fork",
            prompt_ids=pack_ids(prompt[len(before[1]) :] if before is not None and exact else prompt),
            prompt_tokens=len(prompt), completion_tokens=len(sampled), choices=(choice,), nodes=(answer,),
        )  # fmt: skip
        records += [start, end]
        before = (start.call_id, prompt + sampled)
    return records


def _turns(given: ScoredTrajectory) -> list[tuple[tuple[MessageNode, ...], MessageNode]]:
    """Return the nodes of each call's prompt, and the node of its answer."""
    answers = [place for place, one in enumerate(given.messages) if one.get("role") == "assistant" and place]
    if len(answers) != len(given.calls):
        prompt = path([_PROMPT])
        return [(prompt, node(prompt[-1].hash, _ANSWER)) for _ in given.calls]
    nodes = path(given.messages)
    return [(nodes[:place], nodes[place]) for place in answers]
