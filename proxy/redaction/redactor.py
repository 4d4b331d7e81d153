"""Redaction: what matches a pattern never reaches the journal, the store or a log.

Promises: messages, tool definitions, tool arguments, sampling parameters, labels and errors are redacted before they
are written. vLLM and the client get the original. A call with redacted content is stored without token ids, logprobs
and link keys, because they reveal the content, and is untrainable as "redacted". Linking uses the original in memory;
after a restart only an explicit id continues such a call.

Limits: ids that a client chooses for trajectories and requests, and the bytes of images, are not redacted. A match
that is split over two messages is not found.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import msgspec

from ratchet.proxy.dialects.dialect import LARGE, Dialect, ParsedRequest, StorableRequest
from ratchet.proxy.messages.link_records import Leaf, token_fingerprint
from ratchet.proxy.redaction.patterns import RedactionPatterns
from ratchet.proxy.runtime.thread_pools import run_parsing
from ratchet.proxy.wire.error_shapes import ErrorShape
from ratchet.store.content import messages as canon
from ratchet.store.records import REDACTED, CallEnded, CallStarted, Feedback

_encode = msgspec.json.Encoder(order="sorted").encode
_object = msgspec.json.Decoder(dict[str, Any]).decode


class Redactor:
    """Redacts requests, call records and feedback."""

    def __init__(self, patterns: RedactionPatterns) -> None:
        self._patterns = patterns

    def redact_request(self, parsed: ParsedRequest) -> StorableRequest:
        """Return the part of a request that may be stored."""
        request = parsed.request
        original = tuple(parsed.nodes)
        bodies = [self._patterns.json(node.body) for node in original]
        tools = self._patterns.json(request.tools) if request.tools else b""
        sampling = _encode(request.sampling)
        nodes, tools_hash = original, request.tools_hash
        if any(body != node.body for body, node in zip(bodies, nodes, strict=True)):
            nodes = canon.path(map(_object, bodies))
        if tools != request.tools:
            tools_hash, tools = canon.tools_hash(msgspec.json.decode(tools))
        return StorableRequest(
            nodes=nodes,
            tools_hash=tools_hash,
            tools=tools,
            sampling=_object(self._patterns.json(sampling)),
            redacted=nodes is not original or tools_hash != request.tools_hash,
        )

    def redact_start(self, start: CallStarted, storable: StorableRequest) -> CallStarted:
        """Return the redacted start of a call."""
        clean = self._patterns.text
        return msgspec.structs.replace(
            start,
            prompt_node=storable.nodes[-1].hash if storable.nodes else "",
            tools_hash=storable.tools_hash,
            sampling=storable.sampling,
            task=clean(start.task) if start.task else None,
            role=clean(start.role) if start.role else None,
            tags=tuple(clean(tag) for tag in start.tags),
        )

    def redact_end(self, record: CallEnded, leaves: list[Leaf], *, redacted: bool) -> CallEnded:
        """Return the redacted end of a call; its leaves forget tokens that are not stored."""
        bodies = [self._patterns.json(node.body) for node in record.nodes]
        redacted |= any(body != node.body for body, node in zip(bodies, record.nodes, strict=True))
        error = self._patterns.text(record.error) if record.error else None
        if not redacted:
            return record if error == record.error else msgspec.structs.replace(record, error=error)
        nodes = tuple(canon.node(node.parent, _object(body)) for node, body in zip(record.nodes, bodies, strict=True))
        for leaf in leaves:
            leaf.details = msgspec.structs.replace(leaf.details, sequence=token_fingerprint(b""))
        return msgspec.structs.replace(
            record,
            nodes=nodes,
            choices=tuple(
                msgspec.structs.replace(
                    choice,
                    token_ids=b"",
                    logprobs=b"",
                    link_key="",
                    skip_last_key=None,
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

    def redact_feedback(self, feedback: Feedback) -> Feedback:
        """Return redacted feedback. A source that matches a pattern is replaced by its hash."""
        clean = self._patterns.text
        source = feedback.source if clean(feedback.source) == feedback.source else f"hash:{_digest(feedback.source)}"
        return msgspec.structs.replace(
            feedback,
            source=source,
            comment=clean(feedback.comment),
            demonstration=clean(feedback.demonstration) if feedback.demonstration else feedback.demonstration,
        )


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=16).hexdigest()


class RedactingDialect:
    """A dialect that redacts what is stored of its requests. Large requests are redacted in a thread."""

    def __init__(self, dialect: Dialect, redactor: Redactor) -> None:
        self._dialect = dialect
        self._redactor = redactor

    @property
    def name(self) -> str:
        """The name in the records."""
        return self._dialect.name

    @property
    def path(self) -> str:
        """vLLM's route for the inner call."""
        return self._dialect.path

    @property
    def shape(self) -> ErrorShape:
        """The format of errors."""
        return self._dialect.shape

    async def read(self, body: bytes, key_id: str | None) -> ParsedRequest:
        """Parse a request. Raises ProxyError."""
        parsed = await self._dialect.read(body, key_id)
        redact = self._redactor.redact_request
        storable = await run_parsing(redact, parsed) if len(body) > LARGE else redact(parsed)
        return msgspec.structs.replace(parsed, storable=storable)
