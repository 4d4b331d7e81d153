"""Environments of the package `verifiers` as a workflow: `ratchet.environments.verifiers:workflow` (docs/tuner.md).

`PYTHON -m ratchet.environments.verifiers` is the same workflow as a program, for a Python environment of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from dataclasses import asdict

from ratchet.store.install_hint import install_hint
from ratchet.trainer.errors import PluginError

try:
    from ratchet.tuner.environments.verifiers.task_source import open_taskset
    from ratchet.tuner.environments.verifiers.workflow import workflow
except ModuleNotFoundError as error:
    raise PluginError(
        f"the package verifiers (0.4) is missing in {sys.prefix} ({error}): {install_hint('verifiers')}"
    ) from error

__all__ = ["open_taskset", "workflow"]


def main() -> None:
    """Run one task as a program: row on stdin, server in OPENAI_*, output on stdout. Exits with 1 on failure."""
    row = json.load(sys.stdin)
    url, key, model = (os.environ[name] for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL"))
    with contextlib.redirect_stdout(sys.stderr):
        output = asyncio.run(workflow(row, base_url=url, api_key=key, model=model))
    json.dump(asdict(output), sys.stdout)


if __name__ == "__main__":
    main()
