"""A judge module that cannot be imported: its own code fails."""

from __future__ import annotations

WRONG = 1 / 0
