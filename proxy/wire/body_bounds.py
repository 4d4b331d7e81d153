"""What a request's JSON may hold: how deep it goes, how many messages, tools and values.

Bytes alone do not bound what a body costs: two of them are an object. Read before anything else reads the body, so that
nothing behind this meets JSON whose depth or number ends its stack or its memory. An ordinary request costs two counts.

Promises: a refusal names the setting and the number that was found. What is no JSON, its reader refuses.
"""

from __future__ import annotations

from codecs import BOM_UTF8
from dataclasses import dataclass

import msgspec
from msgspec import Raw
from starlette.types import Receive

from ratchet.proxy.errors import BadRequest, BodyTooLarge
from ratchet.proxy.runtime.thread_pools import run_parsing
from ratchet.proxy.wire.asgi import read_body
from ratchet.store.content import json_depth

_LARGE = 256 * 1024  # bytes; larger bodies are looked at in a thread
_LISTS = {"messages": "max_messages", "input": "max_messages", "tools": "max_tools"}

_fields = msgspec.json.Decoder(dict[str, Raw])
_elements = msgspec.json.Decoder(list[Raw])


@dataclass(slots=True, frozen=True)
class BodyBounds:
    """The settings of the same names; `body` is bytes, `max_body_bytes`."""

    body: int
    max_messages: int
    max_tools: int
    max_json_depth: int
    max_json_values: int

    def check(self, body: bytes) -> None:
        """Raise BadRequest or BodyTooLarge where the JSON in a body holds more than it may."""
        opened = body.count(b"{") + body.count(b"[")
        least = min(self.max_json_depth, self.max_messages, self.max_tools)
        if opened <= least and len(body) <= self.max_json_values:
            return
        bare = json_depth.strip_strings(body)
        opened = bare.count(b"{") + bare.count(b"[")
        self._hold("max_json_values", opened + bare.count(b","), "JSON values")
        if opened > self.max_json_depth:
            self._hold("max_json_depth", json_depth.depth(bare), "levels of JSON")
        if opened > least:
            self._check_lists(body)

    def check_messages(self, count: int) -> None:
        """Raise BadRequest where a conversation that is put together has more messages than it may."""
        self._hold("max_messages", count, "messages")

    def _check_lists(self, body: bytes) -> None:
        """Count what the lists hold that have a limit; of what cannot be read, its own reader tells."""
        try:
            fields = _fields.decode(body)
            lists = {name: bytes(fields[name]) for name in _LISTS if name in fields}
            counts = {name: len(_elements.decode(raw)) for name, raw in lists.items() if raw.startswith(b"[")}
        except (msgspec.DecodeError, RecursionError):
            return
        for name, count in counts.items():
            self._hold(_LISTS[name], count, name)

    def _hold(self, setting: str, found: int, what: str) -> None:
        most = getattr(self, setting)
        if found <= most:
            return
        told = f"the request holds {found} {what}, and at most {most} are taken (the proxy's setting {setting})"
        if setting == "max_json_values":
            raise BodyTooLarge(told, code="too_many_values")
        code = {"max_json_depth": "json_too_deep", "max_tools": "too_many_tools"}.get(setting, "too_many_messages")
        raise BadRequest(told, param=what if what in _LISTS else None, code=code)


async def read_json(receive: Receive, bounds: BodyBounds) -> bytes:
    """Return a request body whose JSON is within the bounds. Raises BodyTooLarge, BadRequest, ClientDisconnected."""
    body = (await read_body(receive, bounds.body)).removeprefix(BOM_UTF8)  # as Windows' own tools begin a file
    if len(body) > _LARGE:
        await run_parsing(bounds.check, body)
    else:
        bounds.check(body)
    return body
