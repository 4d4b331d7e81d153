"""Checks a new policy on the validation tasks: its likeliest behaviour has to be wrong, and the right one possible.

The policy plays the e-mail agent in this process, without vLLM: greedily once, and at temperature 1. The mailbox has
other facts than those of the training episodes and of the agent. The held-out tasks are not touched.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from examples.email_search.demonstrations import EpisodeMailbox, tools
from examples.tiny_policy.chat_format import END, Messages, render
from ratchet.demo.email_search.agent import MAX_TURNS, call_tool, opening
from ratchet.demo.email_search.mailbox import Mailbox
from ratchet.demo.email_search.tasks import VALIDATION_PAIRS, MailTask, make_task, matches

MAX_GREEDY = 0.15
MAX_SAMPLED = 0.35
MIN_SAMPLED = 0.15
MIN_COPIED = 0.75
ATTEMPTS = 4  # at each task, at temperature 1
SEED = 9  # of the mailbox and of the sampling
MAX_TOKENS = 64
_CALL = re.compile(r"<tool_call>\n(.*)\n</tool_call>", re.DOTALL)


@dataclass(slots=True)
class PlayedTask:
    """One attempt at one task: its messages so far, and what it did."""

    task: MailTask
    messages: Messages
    answer: str | None = None
    has_read: bool = False
    is_over: bool = False

    @property
    def is_right(self) -> bool:
        """Whether the given answer is the task's."""
        return matches(self.answer, self.task.answer)

    def apply(self, text: str, box: Mailbox) -> None:
        """Append one reply of the policy, and the result of its tool call."""
        call = _parsed(text)
        if call is None:
            self.is_over = True
            return
        name, arguments = call
        result = call_tool(box, name, arguments)
        self.has_read |= name == "read_email" and result.failure is None
        self.answer, self.is_over = result.answer, result.answer is not None
        function = {"name": name, "arguments": arguments}
        reply = {"id": "call", "type": "function", "function": function}
        self.messages.append({"role": "assistant", "content": "", "tool_calls": [reply]})
        self.messages.append({"role": "tool", "tool_call_id": "call", "content": result.content})


@dataclass(frozen=True, slots=True)
class PolicyFigures:
    """Shares of the attempts at the validation tasks; `copied` are the right answers among those that read a mail."""

    greedy: float
    sampled: float
    greedy_read: float
    sampled_read: float
    copied: float

    def failures(self) -> list[str]:
        """Return what keeps the policy from being accepted, as sentences."""
        found = {
            f"greedy success {self.greedy:.1%} is above {MAX_GREEDY:.0%}": self.greedy > MAX_GREEDY,
            f"sampled success {self.sampled:.1%} is above {MAX_SAMPLED:.0%}": self.sampled > MAX_SAMPLED,
            f"sampled success {self.sampled:.1%} is below {MIN_SAMPLED:.0%}": self.sampled < MIN_SAMPLED,
            f"of the sampled answers after reading {self.copied:.1%} are right, not {MIN_COPIED:.0%}": (
                self.copied < MIN_COPIED
            ),
        }
        return [sentence for sentence, holds in found.items() if holds]


@dataclass(slots=True)
class Player:
    """A policy folder, loaded with transformers, that replies to batches of chats."""

    model: Any
    tokenizer: Any
    generator: Any = field(repr=False)

    @classmethod
    def loaded(cls, folder: Path) -> Player:
        """Load the policy in float32, as the demo serves it."""
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return cls(model, AutoTokenizer.from_pretrained(folder), torch.Generator().manual_seed(SEED))

    def replies(self, chats: Sequence[Messages], *, greedy: bool) -> list[str]:
        """Return the next reply in each chat."""
        import torch

        texts = [render(chat, tools(), generation=True) for chat in chats]
        batch = self.tokenizer(texts, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt")
        mask, ids, cache = batch["attention_mask"], batch["input_ids"], None
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        end, written = int(self.tokenizer.convert_tokens_to_ids(END)), []
        with torch.inference_mode():
            for _ in range(MAX_TOKENS):
                found = self.model(
                    input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
                )
                logits, cache = found.logits[:, -1], found.past_key_values
                ids = self._chosen(logits, greedy)
                written.append(ids)
                mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
                positions = positions[:, -1:] + 1
                if bool((torch.cat(written, dim=1) == end).any(dim=1).all()):
                    break
        rows = torch.cat(written, dim=1).tolist()
        return [self.tokenizer.decode(row[: row.index(end)] if end in row else row) for row in rows]

    def _chosen(self, logits: Any, greedy: bool) -> Any:
        if greedy:
            return logits.argmax(-1, keepdim=True)
        return logits.softmax(-1).multinomial(1, generator=self.generator)


def measured(folder: Path) -> PolicyFigures:
    """Play the validation tasks with the policy in `folder`; return its figures."""
    player, stage = Player.loaded(folder), EpisodeMailbox.made(SEED)
    rng = random.Random(SEED)
    tasks = [make_task(stage.by_pair[pair], rng) for pair in VALIDATION_PAIRS]
    greedy = played(player, stage.box, tasks, greedy=True)
    sampled = played(player, stage.box, tasks * ATTEMPTS, greedy=False)
    return PolicyFigures(
        greedy=_share([one.is_right for one in greedy]),
        sampled=_share([one.is_right for one in sampled]),
        greedy_read=_share([one.has_read for one in greedy]),
        sampled_read=_share([one.has_read for one in sampled]),
        copied=_share([one.is_right for one in sampled if one.has_read]),
    )


def played(player: Player, box: Mailbox, tasks: Sequence[MailTask], *, greedy: bool) -> list[PlayedTask]:
    """Play each task once, all of them turn by turn together."""
    attempts = [PlayedTask(task, opening(task.question)) for task in tasks]
    for _ in range(MAX_TURNS):
        running = [one for one in attempts if not one.is_over]
        if not running:
            break
        replies = player.replies([one.messages for one in running], greedy=greedy)
        for one, text in zip(running, replies, strict=True):
            one.apply(text, box)
    return attempts


def _parsed(text: str) -> tuple[str, str] | None:
    """Return the tool and its arguments as JSON text; None for a reply without a valid call."""
    found = _CALL.search(text)
    try:
        call = json.loads(found.group(1)) if found else None
    except ValueError:
        return None
    if not isinstance(call, dict) or not {"name", "arguments"} <= set(call):
        return None
    return str(call["name"]), json.dumps(call["arguments"])


def _share(flags: Sequence[bool]) -> float:
    return sum(flags) / len(flags) if flags else 0.0
