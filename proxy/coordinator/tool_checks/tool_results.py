"""Classifies the result in a tool message: ok, error, timeout or empty.

No standard defines how a tool reports a failure. So this recognizes what frameworks write: `Error: ...` and similar
beginnings of the text, a traceback, or a JSON object with `error`, `isError` or a failure status. Any other text is a
result: a tool that finds the word "error" in a document has not failed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from ratchet.store.states import ToolResult

_MAX_TEXT = 2_000  # characters at the beginning
_MAX_JSON = 64 * 1024  # characters
_NOTHING = frozenset({"", "null", "none", "undefined", "[]", "{}", '""', "''"})
_AFTER = r"(?:\s*(?:[:!\])(>-]|$)|\s+(?:occurred|executing|calling|running|invoking|while|during|after|code|\d{3}\b))"
_KINDS = r"(?:(?:tool|function|execution|runtime|unexpected|internal|validation|http|timeout)[ _-]?)?"
_FAILURE = re.compile(
    rf"\W{{0,3}}{_KINDS}(?:error|exception|failure|fatal|fail|failed|time-?out){_AFTER}"
    r"|\W{0,3}(?:failed to\b|traceback \(most recent call last\)|an? (?:unexpected |internal )?error occurred)"
    rf"|\W{{0,3}}\w{{1,60}}(?:error|exception){_AFTER}"
    r"|\W{0,3}(?:\w{1,60} ){1,3}failed:"
    r"|\W{0,3}(?:\w{1,60} ){0,3}timed[ -]out\b"
    r"|\d{1,4} validation errors?\b",
    re.IGNORECASE,
)
_TIMEOUT = re.compile(r"\btime[d]?[ -]?out(?:\b|error|exception|expired)|\bdeadline exceeded\b", re.IGNORECASE)
_FAILED = frozenset({"error", "failed", "failure", "timeout", "exception"})

_decode = msgspec.json.Decoder().decode


def result_of(message: Mapping[str, Any]) -> ToolResult:
    """Return the result in a message of the role `tool`."""
    text = _text(message.get("content"))
    if text.strip().lower() in _NOTHING:
        return ToolResult.EMPTY
    beginning = text[:_MAX_TEXT]
    failure = _json_failure(text)
    if failure is None and _FAILURE.match(beginning):
        failure = beginning
    if failure is None:
        return ToolResult.OK
    return ToolResult.TIMEOUT if _TIMEOUT.search(failure) else ToolResult.ERROR


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "<part>")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _json_failure(text: str) -> str | None:
    """Return the failure text of a JSON object; None if the text is not an object, or reports no failure."""
    if not text.lstrip().startswith("{") or len(text) > _MAX_JSON:
        return None
    try:
        value = _decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
    error = value.get("error") or value.get("errors") or value.get("exception")
    status = value.get("status")
    failed = isinstance(status, str) and status.lower() in _FAILED
    flagged = any(value.get(name) is True for name in ("isError", "is_error"))
    refused = any(value.get(name) is False for name in ("success", "ok"))
    if not (error or failed or flagged or refused):
        return None
    return f"{status if failed else ''} {error or value.get('message') or ''}"[:_MAX_TEXT]
