"""Scripted episodes for the warm start of the tiny policy: good ones, and the typical failures of untrained agents.

The failures come from real runs: wrong keywords, arguments outside the schema, malformed JSON, answers without
searching or reading, vague searches. `SearchMix` sets how often each happens; `GOOD` never fails, `HASTY` mostly
answers from the search result alone. Episodes run against real mailboxes with different facts, so the policy cannot
memorise answers.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from examples.tiny_policy.chat_format import Messages
from ratchet.demo.email_search.agent import TOOLS, call_tool, opening
from ratchet.demo.email_search.mailbox import CITIES, MONTHS, Mailbox, SyntheticMail, synthetic_mails
from ratchet.demo.email_search.tasks import TRAIN_PAIRS, MailTask, make_task

_JUNK_KEYWORDS = ("email", "message", "information")


@dataclass(frozen=True, slots=True)
class SearchMix:
    """Probabilities of a good step; the failures of the first step share the rest, by the weights below.

    `guess` is the share of the episodes without reading that give a made-up answer; the others end with a remark.
    """

    first: float
    retry: float
    read: float
    answer: float
    guess: float = 0.6


GOOD = SearchMix(first=1.0, retry=1.0, read=1.0, answer=1.0)
MIXED = SearchMix(first=0.42, retry=0.30, read=0.74, answer=0.84)
HASTY = SearchMix(first=0.82, retry=0.70, read=0.30, answer=0.94, guess=0.88)
FIRST_FAILURES = {
    "junk_keyword": 0.30,
    "extra_argument": 0.25,
    "malformed_json": 0.15,
    "blind_answer": 0.15,
    "vague": 0.15,
}


@dataclass(frozen=True, slots=True)
class EpisodeMailbox:
    """A mailbox for episodes, with its mails by pair and by id."""

    box: Mailbox
    by_pair: dict[tuple[str, str], SyntheticMail]
    by_id: dict[str, SyntheticMail]

    @classmethod
    def made(cls, seed: int) -> EpisodeMailbox:
        """Build a mailbox whose facts are determined by `seed`."""
        mails = synthetic_mails(seed)
        box = Mailbox.build(":memory:", (made.mail for made in mails))
        return cls(box, {(m.person, m.topic): m for m in mails}, {m.mail.message_id: m for m in mails})


class Episode:
    """An episode under construction: messages as the agent sends them, results from the real tools."""

    def __init__(self, stage: EpisodeMailbox, task: MailTask) -> None:
        self.stage, self.messages = stage, opening(task.question)

    def act(self, name: str, **arguments: Any) -> str:
        """Append a tool call and its result; return the result."""
        text = json.dumps(arguments)
        call = {"id": f"call-{len(self.messages)}", "type": "function", "function": {"name": name, "arguments": text}}
        content = call_tool(self.stage.box, name, text).content
        self.messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
        return content

    def say(self, text: str) -> None:
        """Append a text instead of a tool call, which ends the episode."""
        self.messages.append({"role": "assistant", "content": text})


def draw(stages: list[EpisodeMailbox], rng: random.Random, mix: SearchMix) -> Messages:
    """Return an episode about a random training pair in a random mailbox."""
    stage = rng.choice(stages)
    return play(stage, make_task(stage.by_pair[rng.choice(TRAIN_PAIRS)], rng), rng, mix)


def play(stage: EpisodeMailbox, task: MailTask, rng: random.Random, mix: SearchMix) -> Messages:
    """Return one scripted episode: search, read, answer, with failures drawn by `mix`."""
    episode = Episode(stage, task)
    hits = _search(episode, task, rng, mix)
    if hits:
        _read_and_answer(episode, task, rng, mix, json.loads(hits)[0]["message_id"])
    return episode.messages


def _search(episode: Episode, task: MailTask, rng: random.Random, mix: SearchMix) -> str | None:
    """Append the turns up to the first result with hits; return it, or None if the episode ended before."""
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
        episode.act("search_inbox", keywords=[*right, rng.choice(_JUNK_KEYWORDS)])
    else:
        episode.act("search_inbox", keywords=right, max_results=5)
    if rng.random() > mix.retry:
        episode.say("I could not find it.")
        return None
    return episode.act("search_inbox", keywords=right)


def _read_and_answer(episode: Episode, task: MailTask, rng: random.Random, mix: SearchMix, message_id: str) -> None:
    if rng.random() > mix.read:
        if rng.random() < mix.guess:
            episode.act("return_final_answer", answer=_guess(task, rng))
        else:
            episode.say("I found one message.")
        return
    episode.act("read_email", message_id=message_id)
    mail = episode.stage.by_id[message_id]
    answer = mail.city if task.kind == "city" else mail.month
    if rng.random() < mix.answer:
        episode.act("return_final_answer", answer=answer)
    else:
        episode.say(f"It is {answer}.")


def _guess(task: MailTask, rng: random.Random) -> str:
    return rng.choice(CITIES if task.kind == "city" else MONTHS)


def tools() -> list[dict[str, Any]]:
    """Return the tool schemas for a chat template."""
    return list(TOOLS)
