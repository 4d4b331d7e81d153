"""How the log lines of a room look: text with `event=... key=value`, or one JSON object per line."""

from __future__ import annotations

import logging
import time
from typing import Literal

import msgspec

from proxy.observing.call_log import FIELDS

_TEXT = "%(asctime)s %(levelname)s %(name)s %(message)s"


def set_up(form: Literal["text", "json"]) -> None:
    """Send every line of this process to stderr in that form."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else logging.Formatter(_TEXT))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("alembic").setLevel(logging.WARNING)  # a dozen lines of its own where a store is made


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
