"""Turns a call into records, and says when they are safe.

The promise: under `capture: strict`, what `end` gives to wait for resolves only when the call is durable in the
journal, or the journal has said that it cannot be (it then holds the record and rings the alarm). Under `relaxed`
there is nothing to wait for.
Neither way can recording fail a call: whatever goes wrong here is logged and counted, and the client gets its answer.

Messages that are durable already are not written again; a bounded memory knows which.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from ratchet.proxy.dialects.dialect import ParsedRequest
from ratchet.proxy.journal.journal import Journal
from ratchet.proxy.messages.link_records import Leaf, Link, TokenFingerprint
from ratchet.proxy.messages.text_fingerprints import TextFingerprints, fingerprints_of
from ratchet.proxy.redaction.redactor import Redactor
from ratchet.proxy.telemetry.metrics import Metrics
from ratchet.proxy.wire.capture import Capture
from ratchet.proxy.worker.call.durable_messages import DurableMessages
from ratchet.store.content import messages as canon
from ratchet.store.records import OTHER, CallBegun, CallEnded, Choice, MessageNode
from ratchet.store.states import CallState

log = logging.getLogger("ratchet.proxy")

_ENGINE_NAMED = ("chat", "completions")  # dialects in which the client gets the engine's id; others word the call's


class CallOutcome(msgspec.Struct):
    """How a call ended, as far as the exchange saw it. Times are Unix seconds."""

    state: CallState
    status: int
    ended_at: float
    first_byte_at: float | None = None
    error: str | None = None
    upstream: str | None = None


class OpenCall(msgspec.Struct):
    """A call under way: its record, its link, and what only the request knows."""

    begun: CallBegun
    link: Link
    keys: tuple[str, ...]  # link keys of the prompt's messages; none where nothing can continue the call
    messages: Sequence[dict[str, Any]]  # of the prompt
    untrainable: str | None
    nodes: tuple[MessageNode, ...]  # all of the prompt, as they are written
    redacted: bool = False  # something of the request's content was not
    ended: CallEnded | None = None  # the record of its end
    epoch: int = 0  # of the recorder's memory when it began


class Recorder:
    """Writes beginnings and ends of calls."""

    def __init__(self, journal: Journal, metrics: Metrics, *, strict: bool, redactor: Redactor | None = None) -> None:
        self._redactor = redactor
        self._journal = journal
        self._metrics = metrics
        self._strict = strict
        self._known = DurableMessages()
        self._epoch = 0

    def forget_durable_messages(self) -> None:
        """Write every message again from now on: a record that carried some was put aside, or some were deleted."""
        self._epoch += 1  # first: what is under way, and left some out, proves nothing any more
        self._known.clear()

    def begin(self, asked: ParsedRequest, link: Link, begun: CallBegun) -> OpenCall:
        """Journal the beginning of a call; it is not waited for."""
        request, kept, epoch = asked.request, asked.storable, self._epoch
        nodes, tools = (asked.nodes, request.tools) if kept is None else (kept.nodes, kept.tools)
        if self._redactor is not None and kept is not None:
            begun = self._redactor.begun(begun, kept)
        begun = msgspec.structs.replace(
            begun,
            nodes=tuple(node for node in nodes if node.hash not in self._known),
            tools=b"" if begun.tools_hash in self._known else tools,
        )
        try:
            self._journal.write(begun)
        except Exception as error:
            log.exception("event=record_failed call=%s reason=%r", begun.call_id, str(error))
        redacted = kept is not None and kept.redacted
        return OpenCall(begun, link, asked.keys, request.messages, request.untrainable, nodes, redacted, epoch=epoch)

    def end(
        self, opened: OpenCall, capture: Capture, end: CallOutcome
    ) -> tuple[list[Leaf], asyncio.Future[bool] | None]:
        """Hand the end of a call to the journal; return its answers, and what the client's last byte waits for."""
        try:
            record, leaves = _assembled(opened, capture, end)
            if self._redactor is not None:
                record = self._redactor.ended(record, leaves, redacted=opened.redacted)
            opened.ended = record
            future = self._journal.commit(record)
            hashes = [node.hash for node in (*record.begun.nodes, *record.nodes)]
            if record.begun.tools:
                hashes.append(record.begun.tools_hash)
            future.add_done_callback(lambda done: self._know(hashes, opened.epoch, done))
        except Exception as error:
            log.exception("event=record_failed call=%s reason=%r", opened.begun.call_id, str(error))
            self._metrics.lost.inc()
            return [], None
        return leaves, future if self._strict else None

    def _know(self, hashes: Iterable[str], epoch: int, done: asyncio.Future[bool]) -> None:
        """Remember which messages are durable; a future that was cancelled or failed proves nothing."""
        if done.cancelled() or not done.result() or epoch != self._epoch:
            return
        self._known.add(hashes)


def _assembled(opened: OpenCall, capture: Capture, end: CallOutcome) -> tuple[CallEnded, list[Leaf]]:
    """Return what `assemble` does; of an answer that it cannot read, that the call has ended and how."""
    try:
        return assemble(opened, capture, end)
    except Exception as error:
        log.exception("event=answer_not_recorded call=%s reason=%r", opened.begun.call_id, str(error))
        return assemble(opened, Capture("", asks_ids=False, asks_logprobs=False, asks_usage=False), end)


def assemble(opened: OpenCall, capture: Capture, end: CallOutcome) -> tuple[CallEnded, list[Leaf]]:
    """Return the record of an ended call, and its answers as leaves that coming requests may continue."""
    begun, parent = opened.begun, opened.link.parent
    prompt = capture.prompt_ids
    context, new_ids = ("fork" if parent else "root"), prompt
    if parent is not None and parent.sequence.begins(prompt):
        context, new_ids = "exact", prompt[parent.sequence.length :]
    choices, nodes, leaves = [], [], []
    parents = _parent_keys(opened)
    for answered in capture.choices:
        message = answered.message()
        node = canon.node(begun.prompt_node, message)
        ids, logprobs = answered.packed()
        keys = canon.answer_keys(parents, message) if opened.keys else ("",)
        choice = Choice(
            index=answered.index,
            finish_reason=answered.finish_reason,
            token_ids=ids,
            logprobs=logprobs,
            reply_node=node.hash,
            link_key=keys[0],
            tool_call_ids=canon.tool_call_ids(message),
        )
        choices.append(choice)
        nodes.append(node)
        if choice.link_key and answered.has_content():
            seen = fingerprints_of(message, keys[2] if keys[2:] else "", keys[1], opened.messages)
            leaves.append(_leaf(begun, choice, prompt, end.ended_at, seen))
    failed = end.state == CallState.FAILED
    untrainable = opened.untrainable or ("failed" if failed else capture.untrainable())
    if untrainable and begun.purpose == OTHER and not failed:
        untrainable = "other_model"  # whose server does not tell ids
    record = CallEnded(
        begun=begun,
        state=end.state,
        ended_at=end.ended_at,
        status=end.status,
        context=context,
        prompt_ids=new_ids,
        prompt_tokens=capture.prompt_tokens,
        completion_tokens=capture.answer_tokens(),
        first_byte_at=end.first_byte_at,
        choices=tuple(choices),
        untrainable=untrainable,
        error=end.error,
        upstream=end.upstream,
        nodes=tuple(nodes),
        response_id=capture.response_id if begun.dialect in _ENGINE_NAMED else None,
    )
    return record, leaves


def _parent_keys(opened: OpenCall) -> list[str]:
    """Return what an answer is known under: its path, itself, its path without a message that may be a reminder."""
    keys = [opened.keys[-1] if opened.keys else "", canon.ANYWHERE]
    if len(opened.keys) > 1 and opened.messages[-1].get("role") not in ("assistant", "tool"):
        keys.append(opened.keys[-2])
    return keys


def _leaf(begun: CallBegun, choice: Choice, prompt: bytes, now: float, seen: TextFingerprints) -> Leaf:
    whole = prompt + choice.token_ids if prompt and choice.token_ids else b""
    return Leaf(
        trajectory_id=begun.trajectory_id,
        call_id=begun.call_id,
        choice=choice.index,
        version=begun.version,
        link_key=choice.link_key,
        tool_call_ids=choice.tool_call_ids,
        key_id=begun.key_id,
        sequence=TokenFingerprint.of(whole),
        created_at=now,
        purpose=begun.purpose,
        fingerprints=seen,
    )
