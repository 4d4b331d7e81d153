"""Content-addressed messages: a canonical form, and hashes over a message and all messages before it. Pure.

- `hash` names the stored node. It covers the whole message, including tool-call ids, and its parent. Its first 4 bytes
  are those of the conversation's first message after the system prompt, and zero above that: in the indexes of the
  store, a conversation's messages are neighbours, and a call with many new ones changes few pages.
- `link_key` finds the trajectory that a request continues. It covers only what every agent repeats: `content: null`,
  missing `content`, content in parts, trimmed whitespace, order and spacing of JSON in arguments or as a whole answer,
  new tool-call ids, added fields and dropped reasoning lead to the same key.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import groupby
from math import isinf
from typing import Any, Protocol, TypeVar

import msgspec

from ratchet.store.content.json_depth import exceeds_depth
from ratchet.store.records import Call, MessageNode, Prompt
from ratchet.store.states import PromptMode

ROOT = ""
ANYWHERE = "anywhere"  # in place of a parent's key: the message at any position
_HASH = "b2:"  # BLAKE2b; every hash text starts with its algorithm
DIGEST_BYTES = 16
_CONVERSATION = slice(len(_HASH), len(_HASH) + 8)  # the digits of a node's hash that its conversation's nodes share
_NO_CONVERSATION = "00000000"
SYSTEM_ROLES = ("system", "developer")

_ANYWHERE = ANYWHERE.encode() + b"\0"

_MAX_DEPTH = 100  # deeper JSON is compared as text

_JSON_ENDS = ("{}", "[]")  # first and last character of a JSON object or list

_REASONING_PARTS = ("thinking", "redacted_thinking", "reasoning")  # agents may drop these parts
_REASONING_END = "</think>"  # of models whose reasoning is not parsed

_encode = msgspec.json.Encoder(order="sorted").encode
_encode_in_order = msgspec.json.Encoder().encode


def canonical(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the message, if need be a copy, without null members, empty content and empty tool-call lists.

    Arguments stay text.
    """
    if None not in message.values() and message.get("content", True) and message.get("tool_calls", True):
        return message  # most messages
    return {
        name: value
        for name, value in message.items()
        if value is not None and not (name in ("content", "tool_calls") and not value)
    }


def visible_content(message: Mapping[str, Any]) -> Any:
    """Return a message's text without outer whitespace and reasoning; other content unchanged."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [part for part in content if not (isinstance(part, dict) and part.get("type") in _REASONING_PARTS)]
        content = joined_texts(parts)
        if content is None:
            return parts
    if not isinstance(content, str):
        return content
    if message.get("role") == "assistant" and _REASONING_END in content:
        content = content.rpartition(_REASONING_END)[2]
    return content.strip()


def joined_texts(parts: Sequence[Any]) -> str | None:
    """Return the text of content in parts, as it is; None if a part is not text."""
    if not all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
        return None
    return "".join(str(part.get("text", "")) for part in parts)


def _arguments(text: Any) -> Any:
    """Return tool-call arguments as a JSON value, or as text if they are not JSON; missing ones are `{}`."""
    return (_json_value(text) if isinstance(text, str) else text) or {}


def _json_value(text: str) -> Any:
    """Return the value of JSON; of any other text itself, without outer whitespace."""
    try:
        return text.strip() if exceeds_depth(text, _MAX_DEPTH) else _decode(text)
    except msgspec.DecodeError:
        return text.strip()


def _whole(number: str) -> float | int:
    """Return a number with a fraction or exponent; an integer if it equals one, as JavaScript writes it.

    Raises ValueError for one that is too large for a float.
    """
    value = float(number)
    if isinf(value):
        raise ValueError("the number is too large")
    return int(value) if abs(value) < 2**53 and value.is_integer() else value


_decode = msgspec.json.Decoder(float_hook=_whole).decode


def called(message: Mapping[str, Any]) -> list[list[Any]]:
    """Return [name, arguments as a JSON value] of each tool call of an assistant message."""
    calls = message.get("tool_calls")
    if not calls:
        return []
    return [
        [call["function"].get("name"), _arguments(call["function"].get("arguments"))]
        for call in calls
        if isinstance(call, dict) and isinstance(call.get("function"), dict)
    ]


def _essence(message: Mapping[str, Any]) -> list[Any]:
    """Return what every agent repeats of a message: role, text, and name and arguments of each tool call.

    An answer that is a JSON object or list counts as a value: some agents send it back with other spacing.
    """
    role, content = message.get("role"), visible_content(message) or None
    if role == "assistant" and isinstance(content, str) and content[0] + content[-1] in _JSON_ENDS:
        value = _json_value(content)
        if not isinstance(value, str):
            return [role, None, called(message), value]
    return [role, content, called(message)]


def _digest(parent: str, body: bytes) -> str:
    return _HASH + blake2b(b"\0".join((parent.encode(), body)), digest_size=DIGEST_BYTES).hexdigest()


def node(parent: str, message: Mapping[str, Any]) -> MessageNode:
    """Return the content-addressed node of `message` under the node named `parent` (ROOT for the first)."""
    body, role = _encode(canonical(message)), str(message.get("role", ""))
    return MessageNode(hash=_node_hash(parent, role, body), parent=parent, role=role, body=body)


def _node_hash(parent: str, role: str, body: bytes) -> str:
    digest = _digest(parent, body)
    conversation = parent[_CONVERSATION] or _NO_CONVERSATION
    if conversation == _NO_CONVERSATION and role not in SYSTEM_ROLES:
        conversation = digest[_CONVERSATION]
    return _HASH + conversation + digest[len(_HASH) :]


def conversation_range(name: str) -> tuple[str, str] | None:
    """Return the lowest and the highest hash that messages of this one's conversation can have.

    None for a system prompt, which conversations share.
    """
    digits = name[_CONVERSATION]
    if digits == _NO_CONVERSATION:
        return None
    return _HASH + digits + "0" * 2 * DIGEST_BYTES, _HASH + digits + "f" * 2 * DIGEST_BYTES


def hashed(parent: str, parent_key: str, message: Mapping[str, Any]) -> tuple[MessageNode, str, bytes]:
    """Return a message's node and link key after those of its parent, and of an assistant's its answer digest.

    An answer digest is the digest in its link key at any position, as bytes.
    """
    body = _encode(_essence(message))
    alone = _ANYWHERE + body if message.get("role") == "assistant" else b""
    digest = blake2b(alone, digest_size=DIGEST_BYTES).digest() if alone else b""
    return node(parent, message), _digest(parent_key, body), digest


def keys_of_digests(digests: bytes) -> list[str]:
    """Return the link keys, at any position, of the messages with these answer digests, one after the other."""
    digits, size = digests.hex(), 2 * DIGEST_BYTES
    return [_HASH + digits[at : at + size] for at in range(0, len(digits), size)]


def path(messages: Iterable[Mapping[str, Any]]) -> tuple[MessageNode, ...]:
    """Return the nodes of a whole message list, first message first."""
    nodes: list[MessageNode] = []
    for message in messages:
        nodes.append(node(nodes[-1].hash if nodes else ROOT, message))
    return tuple(nodes)


def link_key(parent_key: str, message: Mapping[str, Any]) -> str:
    """Return the linking key of `message` under a parent key (ROOT for the first message)."""
    return _digest(parent_key, _encode(_essence(message)))


def answer_keys(parent_keys: Iterable[str], message: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the linking keys of one message under several parent keys."""
    body = _encode(_essence(message))
    return tuple(_digest(parent_key, body) for parent_key in parent_keys)


def link_keys(messages: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the linking key of every message of a list, first message first."""
    keys: list[str] = []
    for message in messages:
        keys.append(link_key(keys[-1] if keys else ROOT, message))
    return tuple(keys)


def tool_call_ids(message: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the ids of the tool calls in an assistant message; they break ties between equal answers."""
    calls = message.get("tool_calls") or ()
    return tuple(str(call["id"]) for call in calls if isinstance(call, dict) and call.get("id"))


def tools_hash(tools: Any) -> tuple[str, bytes]:
    """Return (hash, JSON) of a request's tool list; ("", b"") without tools.

    The hash ignores the order of keys; the JSON keeps it, because chat templates render it.
    """
    if not tools:
        return "", b""
    return _digest("tools", _encode(tools)), _encode_in_order(tools)


def is_intact(stored: MessageNode) -> bool:
    """Return whether a stored node's hash is the hash of its parent and body."""
    return stored.hash == _node_hash(stored.parent, stored.role, stored.body)


def is_intact_toolset(name: str, body: bytes) -> bool:
    """Return whether a stored tool list's hash is the hash of its content."""
    return name == _digest("tools", _encode(msgspec.json.decode(body)))


# The order of a trajectory's calls. Pure.
#
# Start times alone do not give it: while a clock is set back, a call may have an earlier time than the call that it
# continues.


class ContinuingCall(Protocol):
    """What the order depends on."""

    @property
    def id(self) -> str: ...

    @property
    def parent_call(self) -> str | None: ...


_OneCall = TypeVar("_OneCall", bound=ContinuingCall)


def parents_first(calls: Sequence[_OneCall]) -> Sequence[_OneCall]:
    """Return calls, given in the order of their start, so that each follows its parent if that is among them.

    Otherwise the order stays. Calls that continue each other in a circle, which are damaged, come last.
    """
    places = {call.id: place for place, call in enumerate(calls)}
    parents = [places.get(call.parent_call or "", -1) for call in calls]
    if all(parent < place for place, parent in enumerate(parents)):
        return calls
    children: dict[int, list[int]] = {}
    for place, parent in enumerate(parents):
        children.setdefault(parent, []).append(place)
    order, ready = [], children.pop(-1, [])  # in order, as a heap is
    while ready:
        order.append(heapq.heappop(ready))
        for place in children.pop(order[-1], ()):
            heapq.heappush(ready, place)
    order += sorted(place for circle in children.values() for place in circle)
    return [calls[place] for place in order]


# The last answer of a trajectory's main agent. Pure.
#
# A trajectory may have segments (sub-agents, summaries, the context after a compaction) and branches (several answers,
# edited turns). The main agent's segments have the tools and the system prompt of the first segment. Of these, the one
# that was answered last counts, and in it the longest path; of equally long paths, the later one. A single first call
# without tools is not the main agent's if another segment has tools: coding agents request a title this way.


def last_answer_node(calls: Sequence[Call], system_prompt: Callable[[str], str]) -> tuple[str, str]:
    """Return the node of the last answer (or, without answers, of the last prompt) and the hash of the agent's tools.

    `calls`: ordered by `parents_first`; `system_prompt`: returns the system prompt of a prompt's node.
    """
    answered = [call for call in calls if any(choice.reply_node for choice in call.choices)]
    if not answered:
        return (calls[-1].prompt_node, calls[0].tools_hash) if calls else ("", "")
    first, depth = _segments(calls)
    by_id = {call.id: call for call in calls}
    begins = list(dict.fromkeys(first[call.id] for call in answered))
    if len(begins) > 1:
        kinds = {name: (by_id[name].tools_hash, system_prompt(by_id[name].prompt_node)) for name in begins}
        answered = _own([(call, kinds[first[call.id]]) for call in answered])
    segment = first[answered[-1].id]
    inside = [call for call in answered if first[call.id] == segment]
    last = max(enumerate(inside), key=lambda item: (depth[item[1].id], item[0]))[1]
    node = next(choice.reply_node for choice in last.choices if choice.reply_node)
    return node, by_id[first[answered[0].id]].tools_hash


def _own(calls: Sequence[tuple[Call, tuple[str, str]]]) -> list[Call]:
    """Return the calls of the main agent; each call comes with its tools and system prompt."""
    own = calls[0][1]
    if not own[0] and sum(kind == own for _, kind in calls) == 1:
        own = next((kind for _, kind in calls if kind[0]), own)
    return [call for call, kind in calls if kind == own]


def _segments(calls: Sequence[Call]) -> tuple[dict[str, str], dict[str, int]]:
    """Return, by call id, the first call of its segment, and the number of calls before it there."""
    first: dict[str, str] = {}
    depth: dict[str, int] = {}
    for call in calls:
        parent = call.parent_call or ""
        first[call.id] = first.get(parent, call.id)
        depth[call.id] = depth.get(parent, -1) + 1
    return first, depth


# Replaces a conversation's system prompt, or appends to it. Pure; does not modify its arguments.
#
# The system prompt is a first message with the role `system` or `developer`; without one, a message is added.

Message = Mapping[str, Any]


def has_system_prompt(messages: Sequence[Message]) -> bool:
    """Return whether a conversation starts with a system prompt."""
    return bool(messages) and messages[0].get("role") in SYSTEM_ROLES


def beginning(messages: Sequence[Message], mode: PromptMode, text: str) -> dict[str, Any]:
    """Return the first message of a conversation that is served with `text`."""
    if not has_system_prompt(messages):
        return {"role": "system", "content": text}
    first = messages[0]
    content = first.get("content")
    if mode is PromptMode.REPLACE or not content:
        return {**first, "content": text}
    if isinstance(content, str):
        return {**first, "content": f"{content}\n\n{text}"}
    return {**first, "content": [*content, {"type": "text", "text": text}]}


def with_prompt(messages: Sequence[Message], prompt: Prompt | None, family: str | None) -> tuple[Message, ...]:
    """Return a conversation with the prompt's text for a task family; unchanged if there is none."""
    text = prompt.text_for(family) if prompt else ""
    if prompt is None or not text:
        return tuple(messages)
    return (beginning(messages, prompt.mode, text), *messages[has_system_prompt(messages) :])


def with_one_system_message(messages: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Return the messages with one system message at most, at the beginning: many chat templates reject any other.

    The first ones are merged. Later ones become reminders in the user's turn before them, or in one of their own, as
    Claude Code writes them. The role `developer` becomes `system`. Messages that do not change are the same objects.
    """
    result: list[Any] = []
    for is_text, run in groupby(messages, lambda message: _system_text(message) is not None):
        if not is_text:
            result += ({**one, "role": "system"} if one.get("role") == "developer" else one for one in run)
            continue
        system = list(run)
        texts = [text for message in system if (text := _system_text(message))]
        if result:
            result[-1:] = _with_reminders(result[-1], texts)
        elif len(system) > 1 or system[0]["role"] == "developer":
            result.append({"role": "system", "content": "\n\n".join(texts)})
        else:
            result += system
    return result


def _system_text(message: Mapping[str, Any]) -> str | None:
    """Return the text of a system message; None for another role, and for content that is not only text."""
    if message.get("role") not in SYSTEM_ROLES:
        return None
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        words = [text for text in texts if isinstance(text, str)]
        return "\n".join(words) if len(words) == len(content) else None
    return content or "" if content is None or isinstance(content, str) else None


def _with_reminders(before: Mapping[str, Any], texts: Sequence[str]) -> list[Any]:
    """Return a message with the texts as reminders: in it, if it is the user's, else in a user message after it."""
    reminder = "\n\n".join(f"<system-reminder>\n{text}\n</system-reminder>" for text in texts)
    content = before.get("content")
    if not reminder:
        return [before]
    if before.get("role") == "user" and isinstance(content, str):
        return [{**before, "content": f"{content}\n\n{reminder}"}]
    if before.get("role") == "user" and isinstance(content, list):
        return [{**before, "content": [*content, {"type": "text", "text": reminder}]}]
    return [before, {"role": "user", "content": reminder}]
