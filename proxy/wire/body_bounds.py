"""Limits the JSON of a request body: its depth, and the number of messages, tools and values.

A byte limit does not bound the cost of a body: two bytes can be an object. This check runs before any other parsing, so
no parser meets JSON that exhausts its stack or memory, or that holds the interpreter for long: the parser releases it
at its end only, and no other request is served meanwhile. An ordinary request costs three counts of characters.

A refusal names the setting and the number found. Invalid JSON is left to the parser.
"""

from __future__ import annotations

import re
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

_NUMBERS = re.compile(rb"\[[\d\s.,eE+-]++\]")  # a list of them, such as token ids
_NUMBERS_PER_VALUE = 10  # that cost as much as another value

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
        if opened <= lowest_limit and self.has_few_values(body, opened):
            return
        strings = (body.count(b'"') - body.count(b'\\"')) // 2  # at least; each is a value or the name of one
        self._check_limit("max_json_values", strings // 2, "JSON values")
        bare = json_depth.strip_strings(body)
        opened = bare.count(b"{") + bare.count(b"[")
        self._check_values(bare, opened)
        if opened > self.max_json_depth:
            self._check_limit("max_json_depth", json_depth.depth(bare), "levels of JSON")
        if opened > lowest_limit:
            self._check_lists(body)

    def has_few_values(self, body: bytes, opened: int | None = None) -> bool:
        """Return whether a body surely has no more values than allowed. `opened`: its opening brackets, if counted."""
        opened = body.count(b"{") + body.count(b"[") if opened is None else opened
        return opened + body.count(b",") <= self.max_json_values

    def _check_values(self, bare: bytes, opened: int) -> None:
        """Check the number of values in JSON without strings; numbers in lists count as a tenth."""
        count = opened + bare.count(b",")
        if self.max_json_values < count <= self.max_json_values * _NUMBERS_PER_VALUE:
            others = opened + _NUMBERS.sub(b"[]", bare).count(b",")
            count = others + (count - others) // _NUMBERS_PER_VALUE
        self._check_limit("max_json_values", count, "JSON values")

    def check_messages(self, count: int) -> None:
        """Raise BadRequest if an assembled conversation has too many messages."""
        self._check_limit("max_messages", count, "messages")

    def check_fields(self, fields: Mapping[str, Raw], size: int) -> None:
        """Raise MayExceedBounds unless the fields besides messages and tools are within the bounds.

        `size`: bytes of the body, which has few values. Bytes that the fields do not account for may belong to a field
        that occurs twice; they must be too few to be too deep.
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
