"""Several agents in one table of `ratchet status`: versions, rounds, what the next round has, what needs a person."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_COLUMNS = ("agent", "live", "rounds", "next round", "release", "newest decision")


def agents_table(agents: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a line for each agent below a heading, and what waits for approval. `agents`: their status by name."""
    rows = [_COLUMNS, *(_cells(name, found) for name, found in agents.items())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = [("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()
             for row in rows]  # fmt: skip
    lines += [_approval(name) for name, found in agents.items() if found["pending_approval"]]
    return [*lines, "  details of one agent: `ratchet status --model NAME`"]


def _cells(name: str, found: Mapping[str, Any]) -> tuple[str, ...]:
    live, following = found["live"], found["next_round"]
    rounds = ", ".join(f"{count} {state}" for state, count in found["rounds"].items())
    groups = f"{following['groups']:g} of {following['groups_per_round']} groups" if following else "no judge"
    if following and following["to_judge"]:
        groups += f", {following['to_judge']} to judge"
    version = f"@{live['version']}" if live else "none"
    return name, version, rounds or "none", groups, _release(found), _newest(found["decisions"])


def _release(found: Mapping[str, Any]) -> str:
    """Describe the version that is being released."""
    if pending := found["pending_approval"]:
        return f"@{pending['version']} needs APPROVAL"
    if ramp := found["ramp"]:
        return f"@{ramp['version']} {ramp['share']:.0%}"
    following = found["next_round"]
    return ", ".join(following["pending_versions"]) if following and following["pending_versions"] else "-"


def _newest(decisions: Sequence[Mapping[str, Any]]) -> str:
    return f"@{decisions[0]['version']} {decisions[0]['action']} by {decisions[0]['by']}" if decisions else "-"


def _approval(name: str) -> str:
    return f"  APPROVAL  {name}: `ratchet policies promote {name} --reason WHY` or rollback"
