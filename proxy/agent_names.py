"""The names of agents: which are valid, and which one a wrong name means. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Sequence

_INVALID = re.compile(r"[@/\s]")
_MAX_LENGTH = 100
_MAX_COMPARED = 200  # names; comparing more would take milliseconds


def check_agent_names(names: Sequence[str], other_models: Collection[str] = ()) -> None:
    """Raise ValueError unless the names can be served together, and beside the other models."""
    by_folded: dict[str, str] = {}
    others = {other.casefold(): other for other in other_models}
    for name in names:
        if not name or len(name) > _MAX_LENGTH:
            raise ValueError(f"agent {name[:20]!r}: a name has 1 to {_MAX_LENGTH} characters")
        found = _INVALID.search(name)
        wrong = found[0] if found else next((one for one in name if not one.isprintable()), None)
        if wrong:
            reason = ", which separates agent and version" if wrong == "@" else ""
            raise ValueError(f"agent {name!r} contains {wrong!r}{reason}; choose another name")
        if same := by_folded.get(name.casefold()):
            raise ValueError(
                f"agent {name!r} is named twice"
                if same == name
                else f"agents {same!r} and {name!r} differ by case only: rename one of them"
            )
        by_folded[name.casefold()] = name
        if other := others.get(name.casefold()):
            raise ValueError(
                f"model_list: {other} is the name of an agent that this proxy trains; choose another model_name, and "
                "list the agent's vLLM replicas as upstreams"
            )


def nearest_name(wrong: str, names: Sequence[str]) -> str | None:
    """Return the name that a wrong one most likely means: equal but for case, else similar; None without one."""
    folded = wrong[:_MAX_LENGTH].casefold()
    by_folded = {name.casefold(): name for name in names}
    if found := by_folded.get(folded):
        return found
    near = difflib.get_close_matches(folded, list(by_folded)[:_MAX_COMPARED], n=1, cutoff=0.7)
    return by_folded[near[0]] if near else None
