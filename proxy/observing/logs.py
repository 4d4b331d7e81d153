"""Which log lines a room tells, and how they look: text with `event=... key=value`, or one JSON object per line."""

from __future__ import annotations

import logging
import time
from typing import Literal

import msgspec

from proxy.observing.call_log import FIELDS

_TALKATIVE = ("alembic", "httpx", "httpcore", "asyncio")  # libraries whose lines of INFO and below tell a user nothing
_TEXT = "%(asctime)s %(levelname)s %(name)s %(message)s"


Level = Literal["debug", "info", "warning", "error"]
START = "ratchet.start"  # the logger of what `ratchet up` waits for: that a room is ready is told at any level


def set_up(form: Literal["text", "json"], level: Level = "info") -> None:
    """Send the lines of this process from `level` on to stderr in that form."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else logging.Formatter(_TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.getLogger(START).setLevel(logging.INFO)
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))


class JsonLines(logging.Formatter):
    """time (UTC, RFC 3339), level, logger; then a call's fields, or the message; then a traceback as one string."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        told = {
            "time": f"{moment}.{int(record.created % 1 * 1000):03d}Z",
            "level": record.levelname,
            "logger": record.name,
        }
        told |= getattr(record, FIELDS, None) or {"message": record.getMessage()}
        if record.exc_info:
            told["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(told).decode()
