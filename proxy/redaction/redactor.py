"""Redaction: what patterns find in a call never reaches the journal, the store or a log.

Promises: messages, tool definitions, tool arguments, sampling parameters, labels and errors are cleaned before the
first byte is written; what goes to vLLM and to the client stays as it is. Of a call in which content was redacted no
token id, logprob or link key is kept (each would tell the content), and it is marked untrainable as "redacted".
Linking works on the original in memory; after a restart such a call can only be continued by an explicit id.

Does not clean the ids that a client chooses for trajectories and requests, or an image's bytes; does not find what is
split over two messages.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import msgspec

from ratchet.proxy.dialects.dialect import LARGE, Dialect, ParsedRequest, StorableRequest
from ratchet.proxy.messages.link_records import Leaf, TokenFingerprint
from ratchet.proxy.redaction.patterns import RedactionPatterns
from ratchet.proxy.runtime.thread_pools import run_parsing
from ratchet.proxy.wire.error_shapes import ErrorShape
from ratchet.store.content import messages as canon
from ratchet.store.records import REDACTED, CallEnded, CallStarted, Feedback

_encode = msgspec.json.Encoder(order="sorted").encode
_object = msgspec.json.Decoder(dict[str, Any]).decode


class Redactor:
    """Cleans requests and records."""

    def __init__(self, patterns: RedactionPatterns) -> None:
        self._patterns = patterns

    def request(self, asked: ParsedRequest) -> StorableRequest:
        """Return what may be written of a request."""
        request = asked.request
        bodies = [self._patterns.json(node.body) for node in asked.nodes]
        tools = self._patterns.json(request.tools) if request.tools else b""
        sampling = _encode(request.sampling)
        nodes, tools_hash = asked.nodes, request.tools_hash
        if any(body != node.body for body, node in zip(bodies, nodes, strict=True)):
            nodes = canon.path(map(_object, bodies))
        if tools != request.tools:
            tools_hash, tools = canon.tools_hash(msgspec.json.decode(tools))
        return StorableRequest(
            nodes=nodes,
            tools_hash=tools_hash,
            tools=tools,
            sampling=_object(self._patterns.json(sampling)),
            redacted=nodes is not asked.nodes or tools_hash != request.tools_hash,
        )

    def redact_start(self, start: CallStarted, kept: StorableRequest) -> CallStarted:
        """Return the beginning of a call with what may be written of it."""
        clean = self._patterns.text
        return msgspec.structs.replace(
            start,
            prompt_node=kept.nodes[-1].hash if kept.nodes else "",
            tools_hash=kept.tools_hash,
            sampling=kept.sampling,
            task=clean(start.task) if start.task else None,
            role=clean(start.role) if start.role else None,
            tags=tuple(clean(tag) for tag in start.tags),
        )

    def ended(self, record: CallEnded, leaves: list[Leaf], *, redacted: bool) -> CallEnded:
        """Return the end of a call with what may be written of it; its leaves forget tokens that are not kept."""
        bodies = [self._patterns.json(node.body) for node in record.nodes]
        redacted |= any(body != node.body for body, node in zip(bodies, record.nodes, strict=True))
        error = self._patterns.text(record.error) if record.error else None
        if not redacted:
            return record if error == record.error else msgspec.structs.replace(record, error=error)
        nodes = tuple(canon.node(node.parent, _object(body)) for node, body in zip(record.nodes, bodies, strict=True))
        for leaf in leaves:
            leaf.sequence = TokenFingerprint.of_ids(b"")
        return msgspec.structs.replace(
            record,
            nodes=nodes,
            choices=tuple(
                msgspec.structs.replace(
                    choice,
                    token_ids=b"",
                    logprobs=b"",
                    link_key="",
                    reply_node=node.hash,
                    tool_call_ids=tuple(map(self._patterns.text, choice.tool_call_ids)),
                )
                for choice, node in zip(record.choices, nodes, strict=True)
            ),
            context="fork" if record.context != "root" else "root",
            prompt_ids=b"",
            untrainable=REDACTED,
            error=error,
        )

    def feedback(self, said: Feedback) -> Feedback:
        """Return feedback with what may be written of it; a source that must not be written is known by its hash."""
        clean = self._patterns.text
        source = said.source if clean(said.source) == said.source else f"hash:{_digest(said.source)}"
        return msgspec.structs.replace(
            said,
            source=source,
            comment=clean(said.comment),
            demonstration=clean(said.demonstration) if said.demonstration else said.demonstration,
        )


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=16).hexdigest()


class RedactingDialect:
    """A dialect whose requests say what may be written of them. Large requests are cleaned in a thread."""

    def __init__(self, dialect: Dialect, redactor: Redactor) -> None:
        self._dialect = dialect
        self._redactor = redactor

    @property
    def name(self) -> str:
        """The name in the records."""
        return self._dialect.name

    @property
    def path(self) -> str:
        """Where the inner call goes."""
        return self._dialect.path

    @property
    def shape(self) -> ErrorShape:
        """How errors are worded."""
        return self._dialect.shape

    async def read(self, body: bytes, key_id: str | None) -> ParsedRequest:
        """Return what a request asks for. Raises ProxyError."""
        asked = await self._dialect.read(body, key_id)
        clean = self._redactor.request
        kept = await run_parsing(clean, asked) if len(body) > LARGE else clean(asked)
        return msgspec.structs.replace(asked, storable=kept)
