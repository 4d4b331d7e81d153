"""Fingerprints of an answer: they recognize it in a later prompt whose messages before it have changed.

An answer is distinctive if it calls a tool or is long enough not to occur by chance. Text of the answer that already
occurs in its own prompt is not a fingerprint: every caller with the same task writes it too. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Any

import msgspec

from ratchet.store.content import messages as canon

MIN_QUOTE_LENGTH = 32  # characters; texts this long do not occur twice by chance
ANCHOR_LENGTH = 24  # first characters, the key of a quote in the index
PREFIX_LENGTHS = (
    64,
    256,
    1_024,
    4_096,
    16_384,
    65_536,
)  # characters
DIGEST_BYTES = 15  # 120 bits of each hash; Python takes 48 bytes for them, for 16 bytes 64
_HASH_MASK = (1 << 60) - 1
_KEPT = slice(len("b2:"), len("b2:") + 2 * DIGEST_BYTES)  # of a link key
_from_hex = bytes.fromhex
PROMPT = "prompt"  # the role of a plain text prompt
_MAX_ARGUMENTS = 4
_DISTINCTIVE_ID = re.compile(r"(?=[A-Za-z0-9]*[0-9])(?=[A-Za-z0-9]*[A-Za-z])[A-Za-z0-9]{9,}\Z")


class QuotedText(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A text of an answer.

    `prefix_hashes`: distinguish texts with the same beginning; Python's hashes of prefixes of the lengths
    `PREFIX_LENGTHS`, which the workers and coordinators of one proxy share by `PYTHONHASHSEED` (`supervisor.py`).
    """

    anchor: str
    length: int
    digest: bytes
    prefix_hashes: tuple[int, ...] = ()


class TextFingerprints(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The fingerprints of one answer.

    `skip_last_key`: short link key of the path without the prompt's last message. `answer_key`: of the answer alone.
    `content`: its text. `arguments`: those of its tool calls, which only a sub-agent quotes, and only until the calls
    have their results. `whole`: a plain prompt together with its answer.
    """

    skip_last_key: bytes = b""
    answer_key: bytes = b""
    is_distinctive: bool = False
    content: QuotedText | None = None
    arguments: tuple[QuotedText, ...] = ()
    whole: QuotedText | None = None

    @property
    def quotes(self) -> tuple[QuotedText, ...]:
        """The texts that a later prompt may quote."""
        return self.arguments if self.content is None else (self.content, *self.arguments)

    def without_arguments(self) -> TextFingerprints:
        """Return the fingerprints of an answer whose tool calls have their results: nothing quotes their arguments."""
        return msgspec.structs.replace(self, arguments=()) if self.arguments else self


NO_FINGERPRINTS = TextFingerprints()


def fingerprints_of(
    answer: Mapping[str, Any],
    skip_last_key: str,
    answer_key: str,
    prompt: Sequence[Mapping[str, Any]],
    may_contain: Callable[[str], bool] = lambda _: True,
) -> TextFingerprints:
    """Return the fingerprints of an answer to a prompt. `may_contain`: False if no message contains the text."""
    texts: list[str] = []

    def is_new(text: str) -> bool:
        if len(text) < MIN_QUOTE_LENGTH or not may_contain(text):
            return len(text) >= MIN_QUOTE_LENGTH
        if not texts:
            texts.extend(one for one in map(canon.visible_content, prompt) if isinstance(one, str))
        return not any(text in one for one in texts)

    content, calls = canon.visible_content(answer), canon.called(answer)
    spoken = quote_of(content) if isinstance(content, str) and is_new(content) else None
    texts_of_calls = (text.strip() for text in _strings(calls))
    arguments = tuple([quote_of(text) for text in islice(filter(is_new, texts_of_calls), _MAX_ARGUMENTS)])
    is_distinctive = bool(calls) or spoken is not None
    keys = short_key(skip_last_key), short_key(answer_key)
    return TextFingerprints(*keys, is_distinctive, spoken, arguments, _whole(answer, prompt))


def short_key(link_key: str) -> bytes:
    """Return the first bytes of a link key's hash, as answers hold it; no bytes for no key."""
    return _from_hex(link_key[_KEPT])


def quote_of(text: str) -> QuotedText:
    """Return the index entry of a text."""
    prefix_hashes = []
    for step in PREFIX_LENGTHS:
        if step > len(text):
            break
        prefix_hashes.append(prefix_hash(text[:step]))
    return QuotedText(text[:ANCHOR_LENGTH], len(text), digest(text), tuple(prefix_hashes))


def prefix_hash(prefix: str) -> int:
    """Return the hash of the beginning of a text: 60 bits, since a Python integer of more takes half as much again."""
    return hash(prefix) & _HASH_MASK


def text_hash() -> int:
    """Return a hash that is equal in processes that hash texts alike."""
    return hash("ratchet")


def digest(text: str) -> bytes:
    """Return the digest for comparing quoted texts."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()


def is_distinctive_id(tool_call_id: str) -> bool:
    """Return whether a tool call's id ends in random letters and digits; `call_0` does not."""
    return bool(_DISTINCTIVE_ID.search(tool_call_id))


def _whole(answer: Mapping[str, Any], prompt: Sequence[Mapping[str, Any]]) -> QuotedText | None:
    before, after = prompt[-1].get("content") if prompt else None, answer.get("content")
    if not prompt or prompt[-1].get("role") != PROMPT or not (isinstance(before, str) and isinstance(after, str)):
        return None
    text = (before + after).strip()
    return quote_of(text) if len(text) >= MIN_QUOTE_LENGTH else None


def _strings(calls: Iterable[Sequence[Any]]) -> Iterable[str]:
    for _, arguments in calls:
        for value in arguments.values() if isinstance(arguments, dict) else ():
            if isinstance(value, str):
                yield value
