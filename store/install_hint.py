"""How to install Ratchet, an extra or a plug-in of it. The packages are on no index: every message names a clone."""

from __future__ import annotations


def install_hint(extra: str | None = None) -> str:
    """Return the clause of an error message that says how to install Ratchet, or one of its extras."""
    target = f"'.[{extra}]'" if extra else "."
    return f"from a clone of Ratchet: pip install {target}"


def plugin_hint(folder: str) -> str:
    """Return the clause that says how to install one of Ratchet's own plug-ins: a folder of plugins/."""
    return f"install ratchet-rl-{folder}, from a clone of Ratchet: pip install ./plugins/{folder}"
