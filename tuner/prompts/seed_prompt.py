"""The prompt that a search starts from: the system prompt that the agent sends, as observed in rollouts.

If it differs between tasks, it contains task-specific facts (a name, a date, user data) that no single text can
replace; the search then tunes a text that the proxy appends. An agent without a system prompt gets one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ratchet.store.records import Transcript
from ratchet.store.store import Store
from ratchet.trainer.errors import TuningError
from ratchet.tuner.prompts.trials import text_of

Mode = Literal["replace", "append"]

PROBES = 2  # rollouts of different tasks


@dataclass(frozen=True, slots=True)
class SeedPrompt:
    """Start of a search. `is_agents_own`: the agent already sends it; `note`: a description."""

    text: str
    mode: Mode
    is_agents_own: bool
    note: str


def given(text: str) -> SeedPrompt:
    """Return the user's seed prompt. Raises TuningError if it is empty."""
    if not text.strip():
        raise TuningError("the file of --seed-prompt is empty")
    return SeedPrompt(text.strip(), "replace", False, "given by --seed-prompt")


def serving(store: Store, alias: str, mode: Mode | None = None) -> SeedPrompt | None:
    """Return the prompt of the live version; None if it has none, or one that does not fit `mode`.

    A prompt with texts per task family (lessons) is not a single text: it stays the baseline, and the agent's own
    prompt is improved.
    """
    live = store.policies.live().get(alias)
    if live is None or live.prompt_id is None:
        return None
    prompt = store.prompts.get(live.prompt_id)
    if prompt.families or mode not in (None, prompt.mode.value):
        return None
    note = f"the prompt of {alias}@{live.version}, which is live"
    return SeedPrompt(prompt.text, prompt.mode.value, True, note)


def captured(transcripts: Sequence[Transcript], mode: Mode | None = None) -> SeedPrompt:
    """Return the system prompt of rollouts of different tasks. Raises TuningError if no model was called."""
    sent = {system_prompt(one) for one in transcripts if one.calls}
    if not sent:
        raise TuningError(
            "the agent called no model through the proxy in its first rollouts: see `ratchet doctor --workflow`, "
            "or give --seed-prompt FILE"
        )
    if mode == "append":
        return SeedPrompt("", "append", True, "a text is appended to the agent's system prompt")
    if len(sent) > 1:
        if mode == "replace":
            raise TuningError(
                "the agent's system prompt differs between tasks: to replace it, give --seed-prompt FILE; to tune a "
                "text "
                "that is appended to it, leave --mode replace out"
            )
        note = "the agent's system prompt differs between tasks: a text that is appended to it is tuned"
        return SeedPrompt("", "append", True, note)
    (text,) = sent
    note = "the agent's own system prompt" if text else "the agent sends no system prompt: it gets one"
    return SeedPrompt(text, "replace", True, note)


def system_prompt(transcript: Transcript) -> str:
    """Return the system prompt of a trajectory's first call, or an empty string."""
    words = []
    for message in transcript.messages:
        if message.get("role") not in ("system", "developer"):
            break
        words.append(text_of(message.get("content")))
    return "\n\n".join(words)
