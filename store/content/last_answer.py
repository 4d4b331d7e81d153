"""The last answer of a trajectory's main agent. Pure.

A trajectory may have segments (sub-agents, summaries, the context after a compaction) and branches (several answers,
edited turns). The main agent's segments have the tools and the system prompt of the first segment. Of these, the one
that was answered last counts, and in it the longest path; of equally long paths, the later one. A single first call
without tools is not the main agent's if another segment has tools: coding agents request a title this way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ratchet.store.records import Call


def last_answer_node(calls: Sequence[Call], system_prompt: Callable[[str], str]) -> tuple[str, str]:
    """Return the node of the last answer (or, without answers, of the last prompt) and the hash of the agent's tools.

    `calls`: ordered by `parents_first`; `system_prompt`: returns the system prompt of a prompt's node.
    """
    answered = [call for call in calls if any(choice.reply_node for choice in call.choices)]
    if not answered:
        return (calls[-1].prompt_node, calls[0].tools_hash) if calls else ("", "")
    first, depth = _segments(calls)
    by_id = {call.id: call for call in calls}
    begins = list(dict.fromkeys(first[call.id] for call in answered))
    if len(begins) > 1:
        kinds = {name: (by_id[name].tools_hash, system_prompt(by_id[name].prompt_node)) for name in begins}
        answered = _own([(call, kinds[first[call.id]]) for call in answered])
    segment = first[answered[-1].id]
    inside = [call for call in answered if first[call.id] == segment]
    last = max(enumerate(inside), key=lambda item: (depth[item[1].id], item[0]))[1]
    node = next(choice.reply_node for choice in last.choices if choice.reply_node)
    return node, by_id[first[answered[0].id]].tools_hash


def _own(calls: Sequence[tuple[Call, tuple[str, str]]]) -> list[Call]:
    """Return the calls of the main agent; each call comes with its tools and system prompt."""
    own = calls[0][1]
    if not own[0] and sum(kind == own for _, kind in calls) == 1:
        own = next((kind for _, kind in calls if kind[0]), own)
    return [call for call, kind in calls if kind == own]


def _segments(calls: Sequence[Call]) -> tuple[dict[str, str], dict[str, int]]:
    """Return, by call id, the first call of its segment, and the number of calls before it there."""
    first: dict[str, str] = {}
    depth: dict[str, int] = {}
    for call in calls:
        parent = call.parent_call or ""
        first[call.id] = first.get(parent, call.id)
        depth[call.id] = depth.get(parent, -1) + 1
    return first, depth
