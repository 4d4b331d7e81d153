"""The redaction patterns, built in and the user's own. A match becomes `[name]`.

They run on RE2: its time is linear in the text for every pattern, so that no text can make one hang. RE2 has no
look-around and no back-references. Pure; no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from ratchet.store.errors import install_hint

# The order matters: if two patterns match at the same position, the first one wins.
BUILT_IN = {
    "secret": (
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----[A-Za-z0-9+/=\s]+-----END [A-Z ]*PRIVATE KEY-----"
        r"|\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}"
        r"|\b(?:sk|rk|pk|hf|gh[pousr]|github_pat|glpat|xox[abeoprs]|npm|pypi)[_-][A-Za-z0-9_-]{16,}"
        r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bAIza[A-Za-z0-9_-]{35}"
        r"|(?i:\bbearer\s+)[A-Za-z0-9._~+/-]{16,}=*"
    ),
    "email": r"[A-Za-z0-9._%+'-]{1,64}@[A-Za-z0-9.-]{1,190}\.[A-Za-z]{2,24}",
    "iban": r"\b[A-Z]{2}[0-9]{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?\b",
    "card": r"\b[0-9](?:[ -]?[0-9]){12,18}\b",
    "phone": (
        r"(?:\+|\b00)[1-9](?:[ ()./-]{0,2}[0-9]){6,14}\b"
        r"|(?:\([0-9]{3}\) ?|\b[0-9]{3}[. -])[0-9]{3}[. -][0-9]{4}\b"
    ),
}
_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
# Every record contains these words; a pattern that matches one would corrupt it.
_PROTOCOL = (
    "role", "content", "type", "text", "name", "arguments", "id", "tool_calls", "function", "parameters", "properties",
    "description", "index", "image_url", "system", "developer", "user", "assistant", "tool", "prompt", "string",
    "object", "array", "number", "integer", "boolean", "required", "enum",
)  # fmt: skip
_LITERAL = re.compile(rb'"(?:[^"\\]|\\.)*"')
_encode = msgspec.json.Encoder(order="sorted").encode
_string = msgspec.json.Decoder(str).decode


class RedactionPatterns:
    """Patterns by name, compiled into one. Raises ValueError with the name and the remedy for an invalid pattern."""

    def __init__(self, names: Iterable[str], own: Mapping[str, str]) -> None:
        engine = _engine()
        chosen = dict(own)
        for name in names:
            if name not in BUILT_IN:
                raise ValueError(
                    f"redact: {name!r} is not a built-in pattern ({', '.join(BUILT_IN)}); "
                    f"put your own patterns into redact_patterns"
                )
        chosen |= {name: pattern for name, pattern in BUILT_IN.items() if name in set(names)}
        for name, pattern in own.items():
            _check(engine, name, pattern)
        self._names = tuple(chosen)
        whole = "|".join(f"(?P<{name}>{pattern})" for name, pattern in chosen.items())
        self._any = engine.compile(whole, _options(engine))
        # An anchor has another meaning in a whole JSON text than in one of its strings.
        self._quick = not any(re.search(r"[$^]|\\[Az]", pattern) for pattern in own.values())

    def text(self, text: str) -> str:
        """Replace every match in a text; if the text is JSON, also matches that its escapes hide."""
        if text[:1] in ("{", "[", '"') and "\\" in text:
            try:
                plain = _encode(msgspec.json.decode(text))
            except (msgspec.DecodeError, RecursionError):
                plain = b""
            cleaned = self.json(plain)
            if cleaned != plain:
                return cleaned.decode()
        redacted: str = self._any.sub(self._replacement, text)
        return redacted

    def json(self, body: bytes) -> bytes:
        """Replace the matches in all strings of a JSON text, keys included."""
        if self._quick and b"\\" not in body and self._any.search(body) is None:
            return body
        return _LITERAL.sub(self._literal, body)

    def _literal(self, found: re.Match[bytes]) -> bytes:
        text = _string(found[0])
        cleaned = self.text(text)
        return found[0] if cleaned == text else _encode(cleaned)

    def _replacement(self, found: Any) -> str:
        name = next(name for name in self._names if found.group(name) is not None)
        text: str = found.group()
        return text if name in _CHECKS and not _CHECKS[name](text) else f"[{name}]"


def _engine() -> Any:
    try:
        import re2
    except ModuleNotFoundError as error:
        raise ValueError(f"redact needs RE2: {install_hint('redact')}") from error
    return re2


def _options(engine: Any) -> Any:
    options = engine.Options()
    options.log_errors = False
    return options


def _check(engine: Any, name: str, pattern: str) -> None:
    if not _NAME.fullmatch(name) or name in BUILT_IN:
        raise ValueError(
            f"redact_patterns: the name {name!r} must consist of a-z, 0-9 and _, and differ from the built-in names"
        )
    try:
        compiled = engine.compile(pattern, _options(engine))
    except engine.error as error:
        reason = error.args[0]
        reason = reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason)
        raise ValueError(f"redact_patterns: {name} is not a valid RE2 pattern: {reason}") from error
    word = next((word for word in ("", *_PROTOCOL) if compiled.search(word)), None)
    if word is not None:
        matched = f"the word {word!r} of the protocol" if word else "the empty text"
        raise ValueError(f"redact_patterns: {name} matches {matched} and would corrupt every record; make it narrower")


def _is_card(text: str) -> bool:
    """Return whether the digits satisfy Luhn's rule, as card numbers do."""
    digits = [int(sign) for sign in text if sign.isdigit()]
    doubled = [digit * 2 - 9 * (digit > 4) for digit in digits[-2::-2]]
    return (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0


def _is_iban(text: str) -> bool:
    """Return whether the check digits are right (ISO 7064, modulo 97)."""
    bare = text.replace(" ", "")
    return int("".join(str(int(sign, 36)) for sign in bare[4:] + bare[:4])) % 97 == 1


_CHECKS = {"card": _is_card, "iban": _is_iban}
