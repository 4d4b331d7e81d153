"""Records for tests: calls as the proxy ships them, with real hashes and packed tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from ratchet.store.content.messages import link_keys, node, path, tool_call_ids, tools_hash
from ratchet.store.db import schema
from ratchet.store.db.engine import read
from ratchet.store.operation_records import Rollout
from ratchet.store.records import (
    CallEnded,
    CallStarted,
    Choice,
    Group,
    Round,
    ToolCall,
    ToolCallResult,
    Verdict,
    pack_ids,
    pack_logprobs,
)
from ratchet.store.states import CallState, RolloutState, ToolOutcome, ToolResult
from ratchet.store.store import Store

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}
]
QUESTION: list[dict[str, Any]] = [{"role": "system", "content": "Answer."}, {"role": "user", "content": "Where?"}]


def tool_call(arguments: str = '{"a": 1}', call_id: str = "c1") -> dict[str, Any]:
    """Return an assistant message with one tool call."""
    function = {"name": "search", "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }


def call_start(
    call_id: str,
    trajectory_id: str,
    messages: Sequence[Mapping[str, Any]] = QUESTION,
    *,
    at: float = 1.0,
    **changes: Any,
) -> CallStarted:
    """Return the record of a call's start."""
    nodes = path(messages)
    name, body = tools_hash(TOOLS)
    values: dict[str, Any] = {
        "call_id": call_id,
        "trajectory_id": trajectory_id,
        "started_at": at,
        "alias": "agent",
        "version": 0,
        "dialect": "chat",
        "streamed": False,
        "linked_by": "root",
        "prompt_node": nodes[-1].hash,
        "tools_hash": name,
        "tools": body,
        "nodes": nodes,
        "sampling": {"temperature": 1.0},
    }
    return CallStarted(**(values | changes))


def ended(
    start: CallStarted,
    reply: Mapping[str, Any],
    *,
    messages: Sequence[Mapping[str, Any]] = QUESTION,
    prompt: Sequence[int] = (1, 2, 3),
    ids: Sequence[int] = (4, 5),
    context: str = "root",
    **changes: Any,
) -> CallEnded:
    """Return the record of an answered call, half a second after its start."""
    answer = node(start.prompt_node, reply)
    choice = Choice(
        index=0,
        finish_reason="stop",
        token_ids=pack_ids(ids),
        logprobs=pack_logprobs(
            [-6.25] * len(ids)
        ),  # those of a random model with 512 tokens, because the trainer compares them
        reply_node=answer.hash,
        link_key=link_keys([*messages, reply])[-1],
        tool_call_ids=tool_call_ids(reply),
    )
    values: dict[str, Any] = {
        "start": start,
        "state": CallState.ANSWERED,
        "ended_at": start.started_at + 0.5,
        "status": 200,
        "context": context,
        "prompt_ids": pack_ids(prompt),
        "prompt_tokens": len(prompt),
        "completion_tokens": len(ids),
        "choices": (choice,),
        "nodes": (answer,),
    }
    return CallEnded(**(values | changes))


def answered_trajectory(store: Store, name: str, answer: str = "Oslo", **changes: Any) -> None:
    """Ship a trajectory of one answered call."""
    start = call_start(f"call_{name}", name, **changes)
    store.calls.ship([start, ended(start, {"role": "assistant", "content": answer})])


def end_rollout(store: Store, name: str, *, failure: str | None = None, **values: Any) -> Rollout:
    """End a planned rollout as the runner does: with a failure, else with what the workflow returned."""
    state = RolloutState.ENDED if failure is None else RolloutState.FAILED
    times = {"started_at": 1.0, "ended_at": 2.0}
    planned = store.rollouts.get(name)
    store.rollouts.end_all([msgspec.structs.replace(planned, state=state, failure=failure, **(times | values))])
    return store.rollouts.get(name)


def judged_group(
    store: Store,
    names: Sequence[str],
    scores: Sequence[float],
    *,
    task: str = "t",
    versions: Sequence[int] = (),
    alias: str = "agent",
) -> Group:
    """Ship, seal, group and judge one-call trajectories."""
    for name, version in zip(names, versions or [0] * len(names), strict=True):
        answered_trajectory(store, name, task=task, version=version, alias=alias)
    store.trajectories.seal_idle_trajectories(alias, now=100.0, idle_seconds=1.0)
    group = store.groups.create(f"task:{task}", alias, names, now=101.0)
    verdicts = [
        Verdict(trajectory_id=name, group_id=group.id, judge="rule", judge_version="1", score=score)
        for name, score in zip(names, scores, strict=True)
    ]
    store.groups.record_verdicts(group.id, verdicts)
    return store.groups.get(group.id)


def commit_round(
    store: Store,
    alias: str,
    version: int,
    *,
    base: int | None = None,
    checkpoint: str | None = None,
    groups: Sequence[str] = (),
    metrics: Mapping[str, Any] | None = None,
) -> Round:
    """Start and commit the round of a version, from the one before it unless `base` names another."""
    held = store.rounds.start(alias, version - 1 if base is None else base)
    store.rounds.commit(
        held.id,
        version=version,
        checkpoint=checkpoint or f"/c/{version}",
        groups=list(groups),
        metrics=dict(metrics or {}),
    )
    return held


def message_count(store: Store) -> int:
    """Return the number of stored messages, each counted once."""
    with read(store.calls._engine) as connection:
        return int(connection.scalar(sa.select(sa.func.count()).select_from(schema.messages)) or 0)


def tool_called(store: Store, name: str, result: ToolResult, times: int = 50, alias: str = "agent") -> None:
    """Ship a one-call trajectory that called a tool this many times with this result."""
    made = [
        ToolCall(
            call_id=f"call_{name}", choice=0, place=place, alias=alias, version=0, tool="search",
            tool_call_id=f"i{place}", outcome=ToolOutcome.VALID,
        )
        for place in range(times)
    ]  # fmt: skip
    results = [
        ToolCallResult(call_id=f"call_{name}", choice=0, tool_call_id=one.tool_call_id, result=result) for one in made
    ]
    store.tools.record_tool_calls(made, results)
