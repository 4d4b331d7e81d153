"""Writes the records of calls to the journal, and returns a future for their durability.

Promises: under `capture: strict` the future of `record_end` resolves when the call is durable in the journal, or when
the journal cannot write it (it then keeps the record and raises an alarm). Under `relaxed` there is no future.
Recording never fails a call: errors are logged and counted, and the client gets its response.

Messages that are durable already are not written again, and an end record does not repeat the messages and tools of
its begin record.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from ratchet.proxy.dialects.dialect import ParsedRequest
from ratchet.proxy.journal.journal import Journal
from ratchet.proxy.messages.link_records import Leaf, Placement, StoppedText, token_fingerprint
from ratchet.proxy.messages.text_fingerprints import TextFingerprints, fingerprints_of, short_key
from ratchet.proxy.redaction.redactor import Redactor
from ratchet.proxy.telemetry.metrics import ProxyMetrics
from ratchet.proxy.wire import request_body
from ratchet.proxy.wire.capture import Capture
from ratchet.proxy.worker.call.active_call import ActiveCall, CallOutcome, OpenCall
from ratchet.store.content import messages as canon
from ratchet.store.records import OTHER, CallEnded, CallStarted, Choice
from ratchet.store.states import CallState

log = logging.getLogger("ratchet.proxy")

_ENGINE_IDS = ("chat", "completions")  # dialects whose clients get the engine's response id; others get the call's
_GENERATION_SIZE = 25_000  # hashes


class DurableMessages:
    """The hashes of the most recently written messages and tool lists: between one and two generations of them.

    When the current generation is full it becomes the previous one, and the previous one is dropped. A message whose
    hash was dropped is written again, which costs only bytes.
    """

    def __init__(self, generation_size: int = _GENERATION_SIZE) -> None:
        self._size = generation_size
        self._current: set[str] = set()
        self._previous: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._current or name in self._previous

    def add(self, names: Iterable[str]) -> None:
        """Add hashes of durable messages."""
        self._current.update(names)
        if len(self._current) >= self._size:
            self._previous, self._current = self._current, set()

    def clear(self) -> None:
        """Remove all hashes."""
        self._previous, self._current = set(), set()


class Recorder:
    """Records the beginning and the end of calls."""

    def __init__(
        self, journal: Journal, metrics: ProxyMetrics, *, strict: bool, redactor: Redactor | None = None
    ) -> None:
        self._redactor = redactor
        self._journal = journal
        self._metrics = metrics
        self._strict = strict
        self._durable = DurableMessages()
        self._epoch = 0

    def forget_durable_messages(self) -> None:
        """Write every message again from now on: a record with messages was rejected, or messages were deleted."""
        self._epoch += 1  # first: open calls that left messages out prove nothing any more
        self._durable.clear()

    def record_begin(self, parsed: ParsedRequest, placement: Placement, start: CallStarted) -> OpenCall:
        """Write the begin record without waiting for it."""
        request, storable, losses = parsed.request, parsed.storable, self._losses
        nodes, hashes, tools = parsed.nodes, parsed.hashes, request.tools
        if storable is not None:
            nodes, hashes, tools = storable.nodes, tuple([node.hash for node in storable.nodes]), storable.tools
        if self._redactor is not None and storable is not None:
            start = self._redactor.redact_start(start, storable)
        durable = self._count_durable(hashes)
        new = list(hashes[durable:])
        if tools and start.tools_hash not in self._durable:
            new.append(start.tools_hash)
        else:
            tools = b""
        try:
            whole = msgspec.structs.replace(start, nodes=tuple(nodes[durable:]), tools=tools) if new else start
            self._journal.write(whole)
        except Exception as error:
            log.exception("event=record_failed call=%s reason=%r", start.call_id, str(error))
            new = []
        redacted = storable is not None and storable.redacted
        return OpenCall(
            start, placement, parsed.keys, request.messages, request.may_contain, request.untrainable,
            "".join(hashes[request.leading_system : request.leading_system + 1]), redacted, new=new, losses=losses,
        )  # fmt: skip

    @property
    def _losses(self) -> tuple[int, int]:
        """Changes when messages were forgotten, or records were dropped: those of open calls may be gone."""
        return self._epoch, self._journal.records_lost

    def _count_durable(self, hashes: Sequence[str]) -> int:
        """Return how many messages of a path are durable: each record holds those of its path that were not."""
        for place in range(len(hashes), 0, -1):
            if hashes[place - 1] in self._durable:
                return place
        return 0

    def record_end(
        self, call: ActiveCall, outcome: CallOutcome, status: int
    ) -> tuple[list[Leaf], asyncio.Future[bool] | None]:
        """Commit the end record; return the call's answers, and the future that the last byte waits for.

        `status` is what the client gets, for people who read the record.
        """
        open_call = call.open_call
        try:
            record, leaves = _assemble_safely(call, outcome, status, time.time())
            if self._redactor is not None:
                record = self._redactor.redact_end(record, leaves, redacted=open_call.redacted)
            open_call.ended = record
            future = self._journal.commit(record)
            hashes = [*open_call.new, *[node.hash for node in record.nodes]]
            future.add_done_callback(lambda done: self._mark_durable(hashes, open_call.losses, done))
        except Exception as error:
            log.exception("event=record_failed call=%s reason=%r", open_call.start.call_id, str(error))
            self._metrics.lost.inc()
            return [], None
        return leaves, future if self._strict else None

    def _mark_durable(self, hashes: Iterable[str], losses: tuple[int, int], done: asyncio.Future[bool]) -> None:
        """Add the hashes if the commit succeeded and nothing was lost since the call began."""
        if done.cancelled() or done.exception() is not None or not done.result() or losses != self._losses:
            return
        self._durable.add(hashes)


def _assemble_safely(call: ActiveCall, outcome: CallOutcome, status: int, now: float) -> tuple[CallEnded, list[Leaf]]:
    """Return `assemble`'s result; for an unreadable response, an end record without choices."""
    try:
        return assemble(call, call.capture, outcome, status, now)
    except Exception as error:
        log.exception("event=response_not_recorded call=%s reason=%r", call.start.call_id, str(error))
        nothing = Capture("", asks_ids=False, asks_logprobs=False, asks_usage=False)
        return assemble(call, nothing, outcome, status, now)


def assemble(
    call: ActiveCall, capture: Capture, outcome: CallOutcome, status: int, now: float
) -> tuple[CallEnded, list[Leaf]]:
    """Return the end record of a call, and its answers as leaves that later requests may continue."""
    open_call, start = call.open_call, call.open_call.start
    context, new_ids = _new_prompt_ids(open_call, capture.prompt_ids)
    choices, nodes, leaves = [], [], []
    prefix = _continued_text(call)
    parents = _parent_keys(open_call, continued=bool(prefix))
    for sampled in capture.choices:
        message = sampled.message()
        node = canon.node(start.prompt_node, message)
        whole = _joined(prefix, message)
        keys = canon.answer_keys(parents, whole) if open_call.keys else ("",)
        ids, logprobs = sampled.packed()
        choice = Choice(
            index=sampled.index,
            finish_reason=sampled.finish_reason,
            token_ids=ids,
            logprobs=logprobs,
            reply_node=node.hash,
            link_key=keys[0],
            tool_call_ids=canon.tool_call_ids(message),
            skip_last_key=keys[2] if keys[2:] else None,
        )
        choices.append(choice)
        nodes.append(node)
        if choice.link_key and sampled.has_content():
            fingerprints = fingerprints_of(
                message, choice.skip_last_key or "", keys[1], open_call.messages, open_call.may_contain
            )
            stopped = _stopped_text(call, parents[0], whole) if outcome.state == CallState.ABORTED else None
            leaves.append(_leaf(start, choice, capture.prompt_ids, now, fingerprints, stopped))
    record = CallEnded(
        start=start,
        state=outcome.state,
        ended_at=now,
        status=status,
        context=context,
        prompt_ids=new_ids,
        prompt_tokens=capture.prompt_tokens,
        completion_tokens=capture.answer_tokens(),
        first_byte_at=call.first_byte_at,
        choices=tuple(choices),
        untrainable=_untrainable_reason(open_call, capture, outcome),
        error=outcome.error,
        upstream=call.url,
        nodes=tuple(nodes),
        response_id=capture.response_id if start.dialect in _ENGINE_IDS else None,
    )
    return record, leaves


def _new_prompt_ids(open_call: OpenCall, prompt: bytes) -> tuple[str, bytes]:
    """Return how the prompt relates to the parent's tokens, and the ids that are new in it."""
    parent = open_call.placement.link.parent
    if parent is None:
        return "root", prompt
    if parent.is_prefix_of(prompt):
        return "exact", prompt[parent.sequence_length :]
    return "fork", prompt


def _untrainable_reason(open_call: OpenCall, capture: Capture, outcome: CallOutcome) -> str | None:
    failed = outcome.state in (CallState.FAILED, CallState.REFUSED)
    reason = open_call.untrainable or (str(outcome.state) if failed else capture.untrainable())
    if reason and open_call.start.purpose == OTHER and not failed:
        return "other_model"  # its server does not return ids
    return reason


def _continued_text(call: ActiveCall) -> str:
    """Return the final assistant text that vLLM continued: the client sends it back as one message with the answer."""
    request = call.request
    if not request.is_chat or not request_body.is_true(request.fields, "continue_final_message"):
        return ""
    last = call.open_call.messages[-1]
    if last.get("role") != "assistant":
        return ""
    content = last.get("content")
    text = canon.joined_texts(content) if isinstance(content, list) else content
    return text if isinstance(text, str) else ""


def _joined(prefix: str, message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with the text that it continues."""
    content = message.get("content") or ""
    return {**message, "content": prefix + content} if prefix and isinstance(content, str) else message


def _parent_keys(open_call: OpenCall, *, continued: bool) -> list[str]:
    """Return the keys that an answer is indexed by: its path, itself, its path without a message that may be a
    reminder. `continued`: the answer belongs to the prompt's last message.

    A message after the system's alone is no reminder: without it, all conversations of an agent would be alike.
    """
    if continued:
        return [open_call.keys[-2] if len(open_call.keys) > 1 else canon.ROOT, canon.ANYWHERE]
    keys = [open_call.keys[-1] if open_call.keys else "", canon.ANYWHERE]
    is_first_turn = open_call.first_turn in ("", open_call.start.prompt_node)
    if not is_first_turn and open_call.messages[-1].get("role") not in ("assistant", "tool"):
        keys += open_call.keys[-2:-1]
    return keys


def _stopped_text(call: ActiveCall, before: str, answer: Mapping[str, Any]) -> StoppedText | None:
    """Return the text of an answer that its client stopped; `before`: the link key of the path before it."""
    text = canon.visible_content(answer) if call.request.is_chat else None
    return StoppedText.of(short_key(before), text) if isinstance(text, str) else None


def _leaf(
    start: CallStarted,
    choice: Choice,
    prompt: bytes,
    now: float,
    fingerprints: TextFingerprints,
    stopped: StoppedText | None,
) -> Leaf:
    tokens = prompt + choice.token_ids if prompt and choice.token_ids else b""
    return Leaf.of(
        trajectory_id=start.trajectory_id,
        call_id=start.call_id,
        choice=choice.index,
        version=start.version,
        link_key=short_key(choice.link_key),
        tool_call_ids=choice.tool_call_ids,
        key_id=start.key_id,
        sequence=token_fingerprint(tokens),
        created_at=now,
        purpose=start.purpose,
        fingerprints=fingerprints,
        stopped=stopped,
    )
