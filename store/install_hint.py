"""How to install Ratchet or one of its extras. The package is on no index, so that every message names a clone."""

from __future__ import annotations


def install_hint(extra: str | None = None) -> str:
    """Return the clause of an error message that says how to install Ratchet, or one of its extras."""
    target = f"'.[{extra}]'" if extra else "."
    return f"from a clone of Ratchet: pip install {target}"
