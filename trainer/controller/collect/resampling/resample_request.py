"""What a recorded call is asked again with, and whether an answer is one to the same prompt. Pure.

Asked again is only what can be: one answered call that began its trajectory, whose one answer may be trained, and whose
prompt and sampling parameters are on record whole. The seed is left out, since it would give the same answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ratchet.store.records import Call, Transcript
from ratchet.trainer.rows.build_rows import why_untrainable

_NOT_SENT = ("seed", "n")
# Whose value may be `true`; of anything else that is how too large ones stand.
_FLAGS = ("ignore_eos", "parallel_tool_calls", "watermarking")


def find_single_call(recorded: Transcript) -> Call | None:
    """Return the call of a trajectory that can be asked again; None where it cannot."""
    if len(recorded.calls) != 1:
        return None
    call = recorded.calls[0]
    if call.context != "root" or call.parent_call is not None or call.dialect == "completions":
        return None
    if call.status != 200 or len(call.choices) != 1 or why_untrainable(call, call.choices[0]):
        return None
    whole = all(value is not True or name in _FLAGS for name, value in call.sampling.items())
    return call if whole and call.prompt_ids else None


def body(
    alias: str, call: Call, prompt: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the chat request that asks for another answer; `prompt` are the messages that the call ended with."""
    sampling = {name: value for name, value in call.sampling.items() if name not in _NOT_SENT}
    asked: dict[str, Any] = {"model": alias, "messages": list(prompt), **sampling}
    return asked | {"tools": list(tools)} if tools else asked


def is_same_prompt(original: Call, shadow: Transcript) -> bool:
    """Return whether a shadow is one whole answer to the very tokens of the original's prompt."""
    call = find_single_call(shadow)
    return call is not None and call.prompt_ids == original.prompt_ids
