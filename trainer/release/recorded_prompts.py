"""Recorded prompts that versions answer again, off the path of users: chosen here, sent to vLLM directly.

A version's own prompt is substituted as the proxy does it. `seed` and `n` are not sent: each answer is a sample.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ratchet.store.content.messages import with_prompt
from ratchet.store.errors import RecordDamaged, RecordNotFound
from ratchet.store.records import Call, Policy
from ratchet.store.states import CallState
from ratchet.store.store import Store

SAMPLING_PARAMETERS = (
    "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "max_tokens", "max_completion_tokens",
    "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty", "tool_choice", "response_format",
    "chat_template_kwargs", "reasoning_effort",
)  # fmt: skip
_PAGE = 256  # calls
_MAX_PAGES = 8


@dataclass(frozen=True, slots=True)
class RecordedPrompt:
    """The prompt of a recorded call: messages as the agent sent them, tools, sampling parameters; `tokens` long."""

    messages: tuple[Mapping[str, Any], ...]
    tools: Sequence[Mapping[str, Any]]
    sampling: Mapping[str, Any]
    family: str
    tokens: int = 0

    def messages_for(self, policy: Policy, store: Store) -> tuple[Mapping[str, Any], ...]:
        """Return the messages as they are sent to a version."""
        prompt = store.prompts.get(policy.prompt_id) if policy.prompt_id else None
        return with_prompt(self.messages, prompt, self.family)

    @property
    def is_greedy(self) -> bool:
        """Whether every answer of one version would be the same."""
        return self.sampling.get("temperature") == 0 or self.sampling.get("top_k") == 1


def has_sampling_parameters(call: Call) -> bool:
    """Return whether the sampling parameters are recorded; a large value is recorded as True only."""
    return not any(call.sampling.get(name) is True for name in SAMPLING_PARAMETERS)


def sampling_of(call: Call) -> dict[str, Any]:
    """Return the sampling parameters that another answer is sampled with."""
    return {name: call.sampling[name] for name in SAMPLING_PARAMETERS if name in call.sampling}


def newest_prompts(store: Store, alias: str, limit: int) -> list[RecordedPrompt]:
    """Return the newest different prompts of an agent's answered chat calls, as many of each role as there are.

    Reads a bounded number of calls. Prompts with images, and prompts that were deleted or are damaged, are left out.
    """
    found: list[RecordedPrompt] = []
    for call in choose(_suitable_calls(store, alias, 2 * limit), 2 * limit):
        if len(found) < limit and (prompt := _read(store, call)) is not None:
            found.append(prompt)
    return found


def choose(calls: Sequence[Call], limit: int) -> list[Call]:
    """Return at most `limit` calls, the newest of each role in turn. `calls`: newest first. Pure."""
    by_role: dict[str | None, list[Call]] = {}
    for call in calls:
        by_role.setdefault(call.role, []).append(call)
    most = max(map(len, by_role.values()), default=0)
    turns = (mine[place] for place in range(most) for mine in by_role.values() if place < len(mine))
    return [call for _, call in zip(range(limit), turns, strict=False)]


def _suitable_calls(store: Store, alias: str, wanted: int) -> list[Call]:
    """Return the newest calls with different prompts, newest first: enough of every role that the last pages have."""
    prompts: dict[tuple[str, str], Call] = {}
    for call in _newest_calls(store, alias):
        if _is_suitable(call):
            prompts.setdefault((call.prompt_node, call.tools_hash), call)
        if len(prompts) >= 4 * wanted:
            break
    return list(prompts.values())


def _newest_calls(store: Store, alias: str) -> Iterator[Call]:
    before = None
    for _ in range(_MAX_PAGES):
        page = store.calls.page(_PAGE, before, state=CallState.ANSWERED, alias=alias, tokens=False)
        yield from page
        if len(page) < _PAGE:
            return
        before = page[-1].id


def _is_suitable(call: Call) -> bool:
    return call.dialect != "completions" and call.untrainable != "image" and has_sampling_parameters(call)


def _read(store: Store, call: Call) -> RecordedPrompt | None:
    """Return the prompt of a call; None if it is not, or no longer, in the store, or damaged there."""
    try:
        messages = store.trajectories.messages_to(call.prompt_node)
        body = store.tools.toolset(call.tools_hash) if call.tools_hash else b"[]"
        tools = json.loads(body or b"[]")
        family = store.trajectories.get(call.trajectory_id).family
    except (RecordNotFound, RecordDamaged, ValueError):
        return None
    if not messages or body is None:
        return None
    return RecordedPrompt(
        messages, tools if isinstance(tools, list) else [], sampling_of(call), family, call.prompt_tokens
    )
