"""Prints the outcome of a campaign and sets the exit code."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any, NoReturn

_MAX_VIOLATIONS = 20


def print_and_exit(outcome: Any, *, as_json: bool) -> NoReturn:
    """Print a dataclass of counts that has a list `violations`; exit with 1 if that is not empty."""
    content = asdict(outcome)
    if as_json:
        print(json.dumps(content))
    else:
        _print_lines(content)
    sys.exit(1 if outcome.violations else 0)


def _print_lines(content: dict[str, Any]) -> None:
    width = max(map(len, content))
    for name, value in content.items():
        text = ", ".join(f"{n} {key}" for key, n in value.items()) if isinstance(value, dict) else value
        print(f"{name:{width}} {text if name != 'violations' else len(value)}")
    for violation in content["violations"][:_MAX_VIOLATIONS]:
        print(f"  {violation}")
