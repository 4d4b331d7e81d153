"""The prompt that a search begins from: what the agent itself sends, as a rollout shows it.

Where an agent's system prompt differs from task to task it holds what only that task may say (a name, a date, a user's
data); no one text can replace it, so that what is tuned is a text that the proxy appends to it. An agent that sends no
system prompt is given one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ratchet.store.records import Transcript
from ratchet.store.store import Store
from ratchet.trainer.errors import SeedPromptUnknown
from ratchet.tuner.prompts.trials import text_of

Mode = Literal["replace", "append"]

PROBES = 2  # rollouts, at different tasks


@dataclass(frozen=True, slots=True)
class SeedPrompt:
    """What the search begins from. `as_it_comes` the agent sends it by itself; `note` says what was found."""

    text: str
    mode: Mode
    as_it_comes: bool
    note: str


def given(text: str) -> SeedPrompt:
    """Return a seed prompt that the user wrote. Raises SeedPromptUnknown where it is empty."""
    if not text.strip():
        raise SeedPromptUnknown("the file of --seed-prompt holds no text")
    return SeedPrompt(text.strip(), "replace", False, "given by --seed-prompt")


def serving(store: Store, alias: str, mode: Mode | None = None) -> SeedPrompt | None:
    """Return the prompt of the version that serves now; None where it has none, or one that `mode` cannot begin from.

    A prompt with other texts for task families (lessons) is no one text to begin from: it stays the baseline, and what
    the agent itself sends is improved.
    """
    live = store.policies.live().get(alias)
    if live is None or live.prompt_id is None:
        return None
    prompt = store.prompts.get(live.prompt_id)
    if prompt.families or mode not in (None, prompt.mode.value):
        return None
    note = f"the prompt of {alias}@{live.version}, which serves now"
    return SeedPrompt(prompt.text, prompt.mode.value, True, note)


def captured(transcripts: Sequence[Transcript], mode: Mode | None = None) -> SeedPrompt:
    """Return what an agent sent in rollouts at different tasks. Raises SeedPromptUnknown where it called no model."""
    sent = {system_prompt(one) for one in transcripts if one.calls}
    if not sent:
        raise SeedPromptUnknown(
            "the agent called no model through the proxy in its first rollouts: see `ratchet doctor --workflow`, "
            "or give --seed-prompt FILE"
        )
    if mode == "append":
        return SeedPrompt("", "append", True, "a text is appended to the agent's system prompt")
    if len(sent) > 1:
        if mode == "replace":
            raise SeedPromptUnknown(
                "the agent's system prompt differs from task to task: replacing it takes --seed-prompt FILE; without "
                "--mode replace, a text that is appended to it is tuned"
            )
        note = "the agent's system prompt differs from task to task: a text that is appended to it is tuned"
        return SeedPrompt("", "append", True, note)
    (text,) = sent
    note = "the agent's own system prompt" if text else "the agent sends no system prompt: it is given one"
    return SeedPrompt(text, "replace", True, note)


def system_prompt(transcript: Transcript) -> str:
    """Return the system prompt of a trajectory's first call; "" where there is none."""
    words = []
    for message in transcript.messages:
        if message.get("role") not in ("system", "developer"):
            break
        words.append(text_of(message.get("content")))
    return "\n\n".join(words)
