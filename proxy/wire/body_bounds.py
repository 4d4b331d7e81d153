"""Limits the JSON of a request body: its depth, and the number of messages, tools and values.

A byte limit does not bound the cost of a body: two bytes can be an object. This check runs before any other parsing, so
no parser meets JSON that exhausts its stack or memory. An ordinary request costs two counts of characters.

A refusal names the setting and the number found. Invalid JSON is left to the parser.
"""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
from msgspec import Raw
from starlette.types import Receive

from ratchet.proxy.errors import BadRequest, BodyTooLarge
from ratchet.proxy.runtime.thread_pools import run_parsing
from ratchet.proxy.wire.asgi import read_body
from ratchet.store.content import json_depth

_LARGE = 256 * 1024  # bytes; larger bodies are checked in a thread
_LISTS = {"messages": "max_messages", "input": "max_messages", "tools": "max_tools"}

_fields = msgspec.json.Decoder(dict[str, Raw])
_elements = msgspec.json.Decoder(list[Raw])


class MayExceedBounds(Exception):
    """A body was not shown to be within the bounds."""


@dataclass(slots=True, frozen=True)
class BodyBounds:
    """The settings of the same names; `body` is `max_body_bytes`."""

    body: int
    max_messages: int
    max_tools: int
    max_json_depth: int
    max_json_values: int

    def check(self, body: bytes) -> None:
        """Raise BadRequest or BodyTooLarge if the JSON in a body exceeds a limit."""
        opened = body.count(b"{") + body.count(b"[")
        lowest_limit = min(self.max_json_depth, self.max_messages, self.max_tools)
        if opened <= lowest_limit and len(body) <= self.max_json_values:
            return
        bare = json_depth.strip_strings(body)
        opened = bare.count(b"{") + bare.count(b"[")
        self._check_limit("max_json_values", opened + bare.count(b","), "JSON values")
        if opened > self.max_json_depth:
            self._check_limit("max_json_depth", json_depth.depth(bare), "levels of JSON")
        if opened > lowest_limit:
            self._check_lists(body)

    def check_messages(self, count: int) -> None:
        """Raise BadRequest if an assembled conversation has too many messages."""
        self._check_limit("max_messages", count, "messages")

    def check_fields(self, fields: Mapping[str, Raw], size: int) -> None:
        """Raise MayExceedBounds unless the fields besides messages and tools are within the bounds.

        `size`: bytes of the body, at most `max_json_values`, so that it cannot have more values. Bytes that the fields
        do not account for may belong to a field that occurs twice; they must be too few to be too deep.
        """
        for name, raw in fields.items():
            size -= len(name) + 3 + memoryview(raw).nbytes
            if name == "input":  # limited, too
                raise MayExceedBounds
            if name not in _LISTS and json_depth.depth_bound(bytes(raw), self.max_json_depth) >= self.max_json_depth:
                raise MayExceedBounds
        if size >= self.max_json_depth:
            raise MayExceedBounds

    def check_counts(self, messages: int, tools: int, tools_depth: int) -> None:
        """Raise MayExceedBounds unless the numbers of messages and tools, and the tools' levels, are within bounds."""
        if messages > self.max_messages or tools > self.max_tools or tools_depth >= self.max_json_depth:
            raise MayExceedBounds

    def _check_lists(self, body: bytes) -> None:
        """Check the lengths of the limited lists; invalid ones are left to their parser."""
        try:
            fields = _fields.decode(body)
            lists = {name: bytes(fields[name]) for name in _LISTS if name in fields}
            counts = {name: len(_elements.decode(raw)) for name, raw in lists.items() if raw.startswith(b"[")}
        except (msgspec.DecodeError, RecursionError):
            return
        for name, count in counts.items():
            self._check_limit(_LISTS[name], count, name)

    def _check_limit(self, setting: str, count: int, name: str) -> None:
        limit = getattr(self, setting)
        if count <= limit:
            return
        message = f"the request has {count} {name}, at most {limit} are allowed (the proxy's setting {setting})"
        if setting == "max_json_values":
            raise BodyTooLarge(message, code="too_many_values")
        code = {"max_json_depth": "json_too_deep", "max_tools": "too_many_tools"}.get(setting, "too_many_messages")
        raise BadRequest(message, param=name if name in _LISTS else None, code=code)


async def read_json(receive: Receive, bounds: BodyBounds) -> bytes:
    """Return a request body whose JSON is within the bounds. Raises BodyTooLarge, BadRequest, ClientDisconnected."""
    body = (await read_body(receive, bounds.body)).removeprefix(BOM_UTF8)  # written by Windows tools
    if len(body) > _LARGE:
        await run_parsing(bounds.check, body)
    else:
        bounds.check(body)
    return body
