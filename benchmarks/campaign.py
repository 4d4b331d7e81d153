"""How a campaign ends: what it came to is printed, and a broken promise is its exit code."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any, NoReturn

_MOST_SHOWN = 20


def tell(outcome: Any, *, as_json: bool) -> NoReturn:
    """Print a dataclass of counts with a field `violations`, a list of words; exit with 1 where there are any."""
    if as_json:
        print(json.dumps(asdict(outcome)))
    else:
        _print_lines(asdict(outcome))
    sys.exit(1 if outcome.violations else 0)


def _print_lines(content: dict[str, Any]) -> None:
    width = max(map(len, content))
    for name, value in content.items():
        shown = ", ".join(f"{n} {key}" for key, n in value.items()) if isinstance(value, dict) else value
        print(f"{name:{width}} {shown if name != 'violations' else len(value)}")
    for violation in content["violations"][:_MOST_SHOWN]:
        print(f"  {violation}")
