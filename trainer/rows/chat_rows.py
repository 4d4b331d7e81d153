"""Chat rows: conversations that our engine did not sample, as token rows of the model that learns.

The chat template renders what the engine would have been given, and what it would have had to sample: a row holds
prompt, answer, prompt, answer, ..., each piece tokenized by itself as the engine does, and only the answers that are
named carry loss, each up to and with its end token. Where a template rewrites history (Qwen3 drops earlier reasoning)
the next answer begins a further row, so that every answer is learnt in the context in which it would be given.
Promises: no token of a system, user or tool message ever carries loss; a conversation that cannot be told exactly is
refused with the reason. Does not read a store and does not import torch: it is given the tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ratchet.trainer.errors import RowError
from ratchet.trainer.rows.token_row import TokenRow

_PASSED_ON = ("role", "name", "tool_call_id", "reasoning_content")


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages as Chat Completions writes them; `learnt` are the places of the answers that carry loss."""

    name: str
    messages: tuple[Mapping[str, Any], ...]
    learnt: frozenset[int]
    tools: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def of_messages(cls, name: str, messages: Any, tools: Any = ()) -> Conversation:
        """Return a conversation of which every answer is learnt. Raises RowError for what is none."""
        if not isinstance(messages, list | tuple) or not all(isinstance(one, Mapping) for one in messages):
            raise RowError(f"{name}: `messages` is not a list of messages")
        answers = {place for place, one in enumerate(messages) if one.get("role") == "assistant"}
        return cls(name, tuple(messages), frozenset(answers), tuple(tools or ()))


class ChatRows:
    """Renders conversations with a tokenizer and its chat template. Raises RowError where it has no template."""

    def __init__(self, tokenizer: Any) -> None:
        if not tokenizer.chat_template:
            raise RowError("the base model's tokenizer has no chat template: conversations cannot be learnt by it")
        self._tokenizer = tokenizer
        added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        self._special = sorted(added | set(tokenizer.all_special_tokens))

    def rows(self, conversation: Conversation) -> list[TokenRow]:
        """Return the rows of a conversation, all with advantage 1. Raises RowError, which says why there are none."""
        messages = [self._plain(message) for message in conversation.messages]
        tools = [dict(tool) for tool in conversation.tools] or None
        rows: list[TokenRow] = []
        open_row = _OpenRow()
        for place in sorted(conversation.learnt):
            prompt, answer = self._turn(messages, place, tools)
            if not prompt.startswith(open_row.text):
                rows += open_row.closed(conversation.name)
                open_row = _OpenRow()
            context, sampled = prompt[len(open_row.text) :], self._sampled(answer)
            open_row.add(context, self._ids(context), 0)
            open_row.add(sampled, self._ids(sampled), 1)
        rows += open_row.closed(conversation.name)
        if not rows:
            raise RowError("no answer to learn from")
        return rows

    def _turn(self, messages: Sequence[dict[str, Any]], place: int, tools: Any) -> tuple[str, str]:
        """Return what the engine is given for the answer at `place`, and what it would sample and what follows."""
        if not place:
            raise RowError("nothing precedes the first answer")
        prompt = self._rendered(messages[:place], tools, add_generation_prompt=True)
        whole = self._rendered(messages[: place + 1], tools, add_generation_prompt=False)
        if not whole.startswith(prompt):
            raise RowError("the chat template does not go on from its own generation prompt")
        return prompt, whole[len(prompt) :]

    def _sampled(self, answer: str) -> str:
        """Return what an engine samples of an answer: up to the end token. What follows belongs to the next prompt."""
        end = max((answer.rfind(token) + len(token) for token in self._special if token in answer), default=0)
        return answer[: end or None]

    def _rendered(self, messages: Sequence[dict[str, Any]], tools: Any, *, add_generation_prompt: bool) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # a template is a program of the model's author: it may raise anything
            raise RowError(f"the chat template refuses it: {error}") from error
        return text

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _plain(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message as templates read it: text as one string, arguments of tool calls as objects."""
        plain = {name: message[name] for name in _PASSED_ON if message.get(name) is not None}
        plain["content"] = text_of(message.get("content"))
        if message.get("tool_calls"):
            plain["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
        said = json.dumps(plain, ensure_ascii=False)
        if found := next((special for special in self._special if special in said), None):
            raise RowError(f"a message holds the special token {found}")
        return plain


def text_of(content: Any) -> str:
    """Return the content of a message as one text. Raises RowError where it holds more than text."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in content):
        return "".join(part["text"] for part in content)
    raise RowError("not text alone")


def _tool_call(call: Any) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, as vLLM hands it to templates; text that is none stays."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise RowError("a tool call without a function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except ValueError:
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    return {**call, "function": {**function, "arguments": arguments}}


class _OpenRow:
    """A row that may go on."""

    def __init__(self) -> None:
        self.text = ""
        self._ids: list[int] = []
        self._mask: list[int] = []

    def add(self, text: str, ids: Sequence[int], carries: int) -> None:
        self.text += text
        self._ids += ids
        self._mask += [carries] * len(ids)

    def closed(self, name: str) -> Iterator[TokenRow]:
        if any(self._mask):
            yield TokenRow(
                trajectory_id=name,
                ids=tuple(self._ids),
                mask=tuple(self._mask),
                logprobs=(0.0,) * len(self._ids),
                advantage=1.0,
                importance=False,
            )
