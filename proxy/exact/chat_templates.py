"""Learns how a chat template writes assistant messages, by rendering: which id ends a turn, and where a message ends.

No template is known by name. The id that ends a turn is the one after a message's last word, whatever the words are.
Before ids of a kind of message (text, tool calls, with or without reasoning) are spliced for the first time, the end of
the message is found a second way: by rendering the request again with other words in its place. Both ways must agree,
otherwise the template is never spliced.

Promises: a few small renders per template, one per kind of message, then none. Memory is bounded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any, Protocol

import msgspec
from msgspec import Raw

from ratchet.proxy.exact.scale_out import Fields, Rendered, ScaleOut
from ratchet.proxy.exact.splice import ContextFork, first_after_change, tail_after_change

_MAX_TEMPLATES = 256
_MAX_KINDS = 256  # of one template
_SHAPING = ("chat_template", "chat_template_kwargs", "reasoning_effort", "documents", "add_special_tokens")
_WORDS = ("Fig", "Oak")  # with different endings

_encode = msgspec.json.Encoder().encode

Json = Mapping[str, Any]


@dataclass(slots=True)
class Template:
    """What is known of one template. `turn_end_text` is its turn end as text, `max_model_len` the model's context in
    tokens.
    """

    turn_end: int
    turn_end_text: str
    max_model_len: int | None = None
    verified: set[tuple[Any, ...]] = field(default_factory=set)

    def check_context_length(self, plain: int, exact: int, max_tokens: int | None) -> None:
        """Raise ContextFork if the exact prompt leaves much less of the context for the completion than the plain one.

        `plain` and `exact` are prompt lengths, `max_tokens` is the client's limit of the completion.
        """
        if self.max_model_len is None or exact <= plain:
            return
        left, plain_left = self.max_model_len - exact, self.max_model_len - plain
        if left < (plain_left / 2 if max_tokens is None else min(max_tokens, plain_left)):
            raise ContextFork("too_long")


class ModelLister(Protocol):
    """Lists model cards, which have the length of the context."""

    async def models(self, url: str) -> list[dict[str, Any]]:
        """Return a replica's model cards. Raises UpstreamError."""


class Templates:
    """The templates in use, by replica, model and the fields that affect the render."""

    def __init__(self, scale_out: ScaleOut, cards: ModelLister) -> None:
        self._scale_out = scale_out
        self._cards = cards
        self._known: OrderedDict[bytes, Template | None] = OrderedDict()

    async def find_template(self, url: str, family: str, body: Fields) -> Template:
        """Return the template that renders `body`. Raises ContextFork, UpstreamError.

        `family` is the same for all versions of a model.
        """
        shaping = {name: body[name] for name in _SHAPING if name in body}
        key = _encode([url, family, shaping])
        if key not in self._known:
            self._known[key] = await self._inspect(url, {"model": body["model"], **shaping})
            while len(self._known) > _MAX_TEMPLATES:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        template = self._known[key]
        if template is None:
            raise ContextFork("template_unknown")
        return template

    async def verify_turn_end(
        self,
        template: Template,
        url: str,
        body: Fields,
        messages: Sequence[Json],
        place: int,
        rendered: Rendered,
        tail: Sequence[int],
    ) -> None:
        """Verify that `tail` follows the message at `place`. Raises ContextFork, UpstreamError."""
        kind = _kind(messages, place)
        if kind in template.verified:
            return
        changed = [*messages[:place], _with_other_words(messages[place]), *messages[place + 1 :]]
        other = await self._scale_out.render(url, {**body, "messages": Raw(_encode(changed))})
        if tail_after_change(rendered.ids, other.ids, template.turn_end) != list(tail):
            raise ContextFork("template_unproven")
        if len(template.verified) < _MAX_KINDS:
            template.verified.add(kind)

    async def _inspect(self, url: str, fields: Fields) -> Template | None:
        renders = []
        for word in _WORDS:
            messages = [_message("user", "Hi"), _message("assistant", f"Yes {word}"), _message("user", "Go on")]
            renders.append((await self._scale_out.render(url, {**fields, "messages": Raw(_encode(messages))})).ids)
        turn_end = first_after_change(*renders)
        if turn_end is None:
            return None  # the template omits assistant messages
        turn_end_text = await self._scale_out.text(url, msgspec.json.decode(fields["model"]), [turn_end])
        lengths = [card.get("max_model_len") for card in await self._cards.models(url)]
        return Template(turn_end, turn_end_text, max((n for n in lengths if isinstance(n, int)), default=None))


def renders_text(message: Json, text: str) -> bool:
    """Return whether an assistant message's own text contains `text`."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    words = [message.get("content"), message.get("reasoning"), message.get("reasoning_content")]
    words += [function.get(name) for function in functions for name in ("name", "arguments")]
    return any(text in (word if isinstance(word, str) else str(word)) for word in words if word)


def _kind(messages: Sequence[Json], place: int) -> tuple[Any, ...]:
    """Return what a template may distinguish: the message's parts, and the next role."""
    answer = messages[place]
    return (
        bool(answer.get("content")),
        bool(answer.get("reasoning") or answer.get("reasoning_content")),
        min(2, len(answer.get("tool_calls") or ())),
        messages[place + 1].get("role") if place + 1 < len(messages) else None,
    )


def _with_other_words(answer: Json) -> Json:
    """Return the message with its last words changed."""
    word = token_hex(6)
    if calls := answer.get("tool_calls"):
        *before, last = calls
        changed = {**last, "function": {**last["function"], "arguments": _encode({"q": word}).decode()}}
        return {**answer, "tool_calls": [*before, changed]}
    return {**answer, "content": word}


def _message(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}
