"""Times on the command line: an age such as 30d, a moment as ISO 8601."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any

import click

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


class Age(click.ParamType[float]):
    """A length of time: `30d`, `12h`, `90m`, `2w`; in seconds."""

    name = "age"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return seconds."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", str(value))
        if found is None:
            self.fail(f"{value!r} is no age; write 30d, 12h or 2w", param, ctx)
        return float(found[1]) * _SECONDS[found[2]]


class Moment(click.ParamType[float]):
    """A moment as ISO 8601, in UTC where it names no zone; in Unix seconds."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return Unix seconds."""
        try:
            moment = datetime.fromisoformat(str(value))
        except ValueError:
            self.fail(f"{value!r} is no time; write 2026-11-21 or 2026-11-21T12:00:00+01:00", param, ctx)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
