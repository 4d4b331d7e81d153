"""Chat rows for supervised rounds, tokenized in a process of its own, so that the controller never imports torch."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import msgspec

from ratchet.trainer.errors import ModelError, RowError, TuningError
from ratchet.trainer.rows.token_row import TokenRow

# ChatRowsProcess: chat rows from a process of its own, so that the controller never imports transformers and torch.
#
# The process lives as long as a warm start needs it, and its memory ends with it.

_START_SECONDS = 300.0  # for the imports, and for the download of a tokenizer from the hub
_ROW_SECONDS = 60.0
_ERRORS = {kind.__name__: kind for kind in (ModelError, RowError)}


class ChatRowsProcess:
    """Renders conversations with a model's chat template. A context manager; it starts and ends the process.

    Raises RowError if the model has no chat template, ModelError; TuningError if the process ends.
    """

    def __init__(self, model: str) -> None:
        self._model = model

    def __enter__(self) -> ChatRowsProcess:
        command = [sys.executable, "-m", "ratchet.trainer.rows.chat_rows_program", self._model]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            self._response(_START_SECONDS)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def rows(self, conversation: Conversation) -> list[TokenRow]:
        """Return the rows of a conversation, all with advantage 1. Raises RowError if there are none."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(conversation) + b"\n")
            self._process.stdin.flush()
        except OSError:  # it has ended: the missing response says so
            pass
        return msgspec.convert(self._response(_ROW_SECONDS)["rows"], list[TokenRow])

    def _response(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        alarm = threading.Timer(seconds, self._process.kill)
        alarm.start()
        try:
            line = self._process.stdout.readline()
        finally:
            alarm.cancel()
        if not line.endswith(b"\n"):
            raise TuningError(
                f"the process that renders conversations for {self._model} ended, or did not respond within "
                f"{seconds:g} s; the trainer's log says why: start the tuning run again"
            )
        response: dict[str, Any] = msgspec.json.decode(line)
        if "error" in response:
            raise _ERRORS[response["kind"]](response["error"])
        return response

    def _end(self) -> None:
        process = self._process
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


# Chat rows: conversations that vLLM did not sample, as token rows of the trained model. Pure.
#
# The chat template renders the prompts that vLLM would receive and the answers that it would sample. A row contains
# prompt, answer, prompt, answer, ..., each tokenized separately as vLLM does; only the selected answers carry loss, up
# to their end token. If the template rewrites history (Qwen3 drops earlier reasoning), the next answer starts a new
# row, so that every answer is trained in the context in which the model would give it. Promises: no token of a system,
# user or tool message carries loss; a conversation that cannot be rendered exactly is refused with the reason.

_MESSAGE_FIELDS = ("role", "name", "tool_call_id", "reasoning_content")


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in the format of Chat Completions; `trained` are the indices of the answers that carry loss."""

    name: str
    messages: tuple[Mapping[str, Any], ...]
    trained: frozenset[int]
    tools: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def of_messages(cls, name: str, messages: Any, tools: Any = ()) -> Conversation:
        """Return a conversation whose answers are all trained. Raises RowError if `messages` is malformed."""
        if not isinstance(messages, list | tuple) or not all(isinstance(one, Mapping) for one in messages):
            raise RowError(f"{name}: `messages` is not a list of messages")
        answers = {place for place, one in enumerate(messages) if one.get("role") == "assistant"}
        return cls(name, tuple(messages), frozenset(answers), tuple(tools or ()))


class ChatRenderer(Protocol):
    """Turns conversations into rows."""

    def rows(self, conversation: Conversation) -> list[TokenRow]: ...


class ChatRows:
    """Renders conversations with a tokenizer's chat template. Raises RowError if it has none."""

    def __init__(self, tokenizer: Any) -> None:
        if not tokenizer.chat_template:
            raise RowError("the base model's tokenizer has no chat template: it cannot be trained on conversations")
        self._tokenizer = tokenizer
        added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        self._special = sorted(added | set(tokenizer.all_special_tokens))

    def rows(self, conversation: Conversation) -> list[TokenRow]:
        """Return the rows of a conversation, all with advantage 1. Raises RowError if there are none."""
        messages = [self._plain(message) for message in conversation.messages]
        tools = [dict(tool) for tool in conversation.tools] or None
        rows: list[TokenRow] = []
        open_row = _OpenRow()
        for place in sorted(conversation.trained):
            prompt, answer = self._turn(messages, place, tools)
            if not prompt.startswith(open_row.text):
                rows += open_row.finish(conversation.name)
                open_row = _OpenRow()
            context, sampled = prompt[len(open_row.text) :], self._sampled(answer)
            open_row.add(context, self._ids(context), 0)
            open_row.add(sampled, self._ids(sampled), 1)
        rows += open_row.finish(conversation.name)
        if not rows:
            raise RowError("no answer to learn from")
        return rows

    def _turn(self, messages: Sequence[dict[str, Any]], place: int, tools: Any) -> tuple[str, str]:
        """Return the prompt of the answer at index `place`, and the rendered text from the answer on."""
        if not place:
            raise RowError("nothing precedes the first answer")
        prompt = self._rendered(messages[:place], tools, add_generation_prompt=True)
        whole = self._rendered(messages[: place + 1], tools, add_generation_prompt=False)
        if not whole.startswith(prompt):
            raise RowError("the chat template does not go on from its own generation prompt")
        return prompt, whole[len(prompt) :]

    def _sampled(self, answer: str) -> str:
        """Return the part of a rendered answer that vLLM samples: up to the end token."""
        end = max((answer.rfind(token) + len(token) for token in self._special if token in answer), default=0)
        return answer[: end or None]

    def _rendered(self, messages: Sequence[dict[str, Any]], tools: Any, *, add_generation_prompt: bool) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # a template is a program and may raise any exception
            raise RowError(f"the chat template fails: {error}") from error
        return text

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _plain(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message in the format of templates: content as one string, tool-call arguments as objects."""
        plain = {name: message[name] for name in _MESSAGE_FIELDS if message.get(name) is not None}
        plain["content"] = text_of(message.get("content"))
        if message.get("tool_calls"):
            plain["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
        text = json.dumps(plain, ensure_ascii=False)
        if token := next((special for special in self._special if special in text), None):
            raise RowError(f"a message contains the special token {token}")
        return plain


def text_of(content: Any) -> str:
    """Return the content of a message as one text. Raises RowError if it has parts other than text."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in content):
        return "".join(part["text"] for part in content)
    raise RowError("not text alone")


def _tool_call(call: Any) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, as vLLM passes it to templates, if they are JSON."""
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
    """A row that further messages may extend."""

    def __init__(self) -> None:
        self.text = ""
        self._ids: list[int] = []
        self._mask: list[int] = []

    def add(self, text: str, ids: Sequence[int], is_trained: int) -> None:
        self.text += text
        self._ids += ids
        self._mask += [is_trained] * len(ids)

    def finish(self, name: str) -> Iterator[TokenRow]:
        if any(self._mask):
            yield TokenRow(
                trajectory_id=name,
                ids=tuple(self._ids),
                mask=tuple(self._mask),
                logprobs=(0.0,) * len(self._ids),
                advantage=1.0,
                importance=False,
            )
