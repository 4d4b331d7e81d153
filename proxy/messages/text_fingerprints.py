"""What an answer leaves behind in later prompts, apart from its path: by these it is known again when the path changed.

An answer is telling where nobody else says it by chance: it calls a tool or is long enough. Words that stood in the
answer's own prompt are no trace of the answer: whoever has the same task writes them, too. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from ratchet.store.content import messages as canon

LEAST = 32  # characters that nobody writes twice by chance
ANCHOR_LENGTH = 24  # of them, the first, by which a quote is looked up
PREFIX_LENGTHS = (64, 256, 1_024, 4_096, 16_384, 65_536)  # characters after which words that begin alike are told apart
DIGEST_BYTES = 16
PROMPT = "prompt"  # the role of a plain text prompt
_MOST_ARGUMENTS = 4
_TELLING_ID = re.compile(r"(?=[A-Za-z0-9]*[0-9])(?=[A-Za-z0-9]*[A-Za-z])[A-Za-z0-9]{9,}\Z")


class QuotedText(msgspec.Struct, frozen=True):
    """Words of ours. `pending`: a tool call's argument, which only a sub-agent quotes, and only until it is done;
    `heads`: this process' hashes of the first characters, so many as each of `PREFIX_LENGTHS` says that they have.
    """

    anchor: str
    length: int
    digest: bytes
    pending: bool = False
    heads: tuple[int, ...] = ()


class TextFingerprints(msgspec.Struct, frozen=True):
    """`skip_last_key`: the path without the prompt's last message; `answer_key`: the answer wherever it stands;
    `whole`: the text of a plain prompt with the answer behind it.
    """

    skip_last_key: str = ""
    answer_key: str = ""
    is_distinctive: bool = False
    quotes: tuple[QuotedText, ...] = ()
    whole: QuotedText | None = None


NO_FINGERPRINTS = TextFingerprints()


def fingerprints_of(
    answer: Mapping[str, Any], skip_last_key: str, answer_key: str, prompt: Sequence[Mapping[str, Any]]
) -> TextFingerprints:
    """Return the traces of an answer to a prompt."""
    texts = [text for text in map(canon.spoken, prompt) if isinstance(text, str)]
    said, calls = canon.spoken(answer), canon.called(answer)
    spoken = isinstance(said, str) and _is_new(said, texts)
    quotes = [quote_of(said)] if spoken else []
    arguments = (text.strip() for text in _strings(calls))
    quotes += [quote_of(text, pending=True) for text in arguments if _is_new(text, texts)][:_MOST_ARGUMENTS]
    return TextFingerprints(skip_last_key, answer_key, bool(calls) or spoken, tuple(quotes), _whole(answer, prompt))


def quote_of(text: str, *, pending: bool = False) -> QuotedText:
    """Return the quote of a text."""
    heads = []
    for step in PREFIX_LENGTHS:
        if step > len(text):
            break
        heads.append(hash(text[:step]))
    return QuotedText(text[:ANCHOR_LENGTH], len(text), digest(text), pending, tuple(heads))


def digest(text: str) -> bytes:
    """Return what a quoted text is compared by."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()


def is_distinctive(tool_call_id: str) -> bool:
    """Return whether a tool call's id ends in random letters and digits; `call_0` does not."""
    return bool(_TELLING_ID.search(tool_call_id))


def _is_new(text: str, before: Iterable[str]) -> bool:
    return len(text) >= LEAST and not any(text in one for one in before)


def _whole(answer: Mapping[str, Any], prompt: Sequence[Mapping[str, Any]]) -> QuotedText | None:
    before, after = prompt[-1].get("content") if prompt else None, answer.get("content")
    if not prompt or prompt[-1].get("role") != PROMPT or not (isinstance(before, str) and isinstance(after, str)):
        return None
    text = (before + after).strip()
    return quote_of(text) if len(text) >= LEAST else None


def _strings(calls: Iterable[Sequence[Any]]) -> Iterable[str]:
    for _, arguments in calls:
        for value in arguments.values() if isinstance(arguments, dict) else ():
            if isinstance(value, str):
                yield value
