"""The Berkeley Function-Calling Leaderboard, by its public package `bfcl-eval`, against the proxy.

The package pins versions that conflict with everything else, so that it lives in an environment of its own
(`environment.py`) and is driven by one program there (`program.py`), which knows nothing of Ratchet.
"""

from __future__ import annotations

PACKAGE = "bfcl-eval"
VERSION = "2026.3.23"
