"""Content-addressed messages: a canonical form, and hashes over a message and all messages before it. Pure.

- `hash` names the stored node. It covers the whole message, including tool-call ids, and its parent. Its first 4 bytes
  are those of the conversation's first message after the system prompt, and zero above that: in the indexes of the
  store, a conversation's messages are neighbours, and a call with many new ones changes few pages.
- `link_key` finds the trajectory that a request continues. It covers only what every agent repeats: `content: null`,
  missing `content`, content in parts, trimmed whitespace, order and spacing of JSON in arguments or as a whole answer,
  new tool-call ids, added fields and dropped reasoning lead to the same key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from math import isinf
from typing import Any

import msgspec

from ratchet.store.content.json_depth import exceeds_depth
from ratchet.store.records import MessageNode

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
