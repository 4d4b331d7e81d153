"""Scripted episodes for the warm start of the tiny policy: good ones, and the failures that untrained agents show.

The failures are those of real runs: wrong keywords, arguments that the schema does not have, malformed JSON, answering
without searching or reading, vague searches. `Mix` says how often each happens; `GOOD` never fails. Episodes are
played against real mailboxes with facts of their own, so that no answer can be learned by heart.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from examples.tiny_policy.chat_format import Messages
from ratchet.demo.email_search.mailbox import Mailbox, SyntheticMail, synthetic_mails
from ratchet.demo.email_search.prompt import opening
from ratchet.demo.email_search.tasks import TRAIN_PAIRS, Task, make_task
from ratchet.demo.email_search.tools import TOOLS, call_tool
from ratchet.demo.email_search.words import CITIES, JUNK_KEYWORDS, MONTHS


@dataclass(frozen=True, slots=True)
class Mix:
    """Probabilities of a good step; the failures of the first step share what is left, by the weights below."""

    first: float
    retry: float
    read: float
    answer: float


GOOD = Mix(first=1.0, retry=1.0, read=1.0, answer=1.0)
MIXED = Mix(first=0.42, retry=0.30, read=0.74, answer=0.84)
FIRST_FAILURES = {
    "junk_keyword": 0.30,
    "extra_argument": 0.25,
    "malformed_json": 0.15,
    "blind_answer": 0.15,
    "vague": 0.15,
}


@dataclass(frozen=True, slots=True)
class Stage:
    """A mailbox of its own with the mails by pair: where an episode is played."""

    box: Mailbox
    by_pair: dict[tuple[str, str], SyntheticMail]
    by_id: dict[str, SyntheticMail]

    @classmethod
    def made(cls, seed: int) -> Stage:
        """A stage whose facts follow from `seed`."""
        mails = synthetic_mails(seed)
        box = Mailbox.build(":memory:", (made.mail for made in mails))
        return cls(box, {(m.person, m.topic): m for m in mails}, {m.mail.message_id: m for m in mails})


class Episode:
    """One episode in the making: messages as the agent would send them, tool results from the real tools."""

    def __init__(self, stage: Stage, task: Task) -> None:
        self.stage, self.messages = stage, opening(task.question)

    def act(self, name: str, **arguments: Any) -> str:
        """A tool call and its result; returns what the tool said."""
        text = json.dumps(arguments)
        call = {"id": f"call-{len(self.messages)}", "type": "function", "function": {"name": name, "arguments": text}}
        content = call_tool(self.stage.box, name, text).content
        self.messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
        return content

    def say(self, text: str) -> None:
        """A text instead of a tool call: it ends the episode."""
        self.messages.append({"role": "assistant", "content": text})


def draw(stages: list[Stage], rng: random.Random, mix: Mix) -> Messages:
    """An episode about a random training pair on a random stage."""
    stage = rng.choice(stages)
    return play(stage, make_task(stage.by_pair[rng.choice(TRAIN_PAIRS)], rng), rng, mix)


def play(stage: Stage, task: Task, rng: random.Random, mix: Mix) -> Messages:
    """One scripted episode: search, read, answer, with the failures that `mix` asks for."""
    episode = Episode(stage, task)
    hits = _search(episode, task, rng, mix)
    if hits:
        _read_and_answer(episode, task, rng, mix, json.loads(hits)[0]["message_id"])
    return episode.messages


def _search(episode: Episode, task: Task, rng: random.Random, mix: Mix) -> str | None:
    """Plays up to the first result with hits and returns it; None where the episode ended before."""
    right = [task.person, task.topic]
    if rng.random() < mix.first:
        return episode.act("search_inbox", keywords=right)
    failure = rng.choices(list(FIRST_FAILURES), list(FIRST_FAILURES.values()))[0]
    if failure == "vague":
        return episode.act("search_inbox", keywords=[rng.choice(right)])
    if failure == "blind_answer":
        episode.act("return_final_answer", answer=_guess(task, rng))
        return None
    if failure == "malformed_json":
        whole = json.dumps({"name": "search_inbox", "arguments": {"keywords": right}})
        episode.say("<tool_call>\n" + whole[: -rng.choice((1, 2))] + "\n</tool_call>")
        return None
    if failure == "junk_keyword":
        episode.act("search_inbox", keywords=[*right, rng.choice(JUNK_KEYWORDS)])
    else:
        episode.act("search_inbox", keywords=right, max_results=5)
    if rng.random() > mix.retry:
        episode.say("I could not find it.")
        return None
    return episode.act("search_inbox", keywords=right)


def _read_and_answer(episode: Episode, task: Task, rng: random.Random, mix: Mix, message_id: str) -> None:
    if rng.random() > mix.read:
        if rng.random() < 0.6:
            episode.act("return_final_answer", answer=_guess(task, rng))
        else:
            episode.say("I found one message.")
        return
    episode.act("read_email", message_id=message_id)
    made = episode.stage.by_id[message_id]
    asked = made.city if task.kind == "city" else made.month
    if rng.random() < mix.answer:
        episode.act("return_final_answer", answer=asked)
    else:
        episode.say(f"It is {asked}.")


def _guess(task: Task, rng: random.Random) -> str:
    return rng.choice(CITIES if task.kind == "city" else MONTHS)


def tools() -> list[dict[str, Any]]:
    """The tool schemas as a chat template takes them."""
    return list(TOOLS)
