"""Weights & Biases: points as a run, offline unless WANDB_MODE says otherwise.

Offline, nothing leaves the machine: `wandb sync FOLDER/wandb/offline-run-*` sends it when a person wants that. Each
start of the trainer is a run of the alias's group; its curves are drawn by version, so that they follow each other.
Neither code, nor packages, nor the machine's figures, nor what is printed is recorded.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import wandb

from ratchet.trainer.observability.monitors import Point

OFFLINE = "offline"
_INIT_TIMEOUT = 15.0  # seconds that a server gets to answer; the end of the process waits for it too


class WandbMonitor:
    """Writes one run. Raises wandb's exceptions, for example if it is configured to be online and has no connection."""

    def __init__(self, folder: Path, alias: str, environ: Mapping[str, str] = os.environ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        logging.getLogger("wandb").setLevel(logging.WARNING)  # what it says else is in its own folder
        quiet = wandb.Settings(
            console="off", silent=True, disable_code=True, disable_git=True, x_disable_meta=True, x_disable_stats=True,
            x_save_requirements=False, init_timeout=_INIT_TIMEOUT,
        )  # fmt: skip
        mode: Any = environ.get("WANDB_MODE") or OFFLINE
        self._run = wandb.init(
            project=environ.get("WANDB_PROJECT") or "ratchet",
            group=alias,
            dir=str(folder),
            mode=mode,
            settings=quiet,
            reinit="create_new",
        )
        self._run.define_metric("*", step_metric="version")

    def write(self, points: Sequence[Point]) -> None:
        """Log the points."""
        for point in points:
            note = {"decision/note": point.note} if point.note is not None else {}
            self._run.log({"version": point.version, "at": point.at, **point.values, **note})

    def close(self) -> None:
        """End the run."""
        self._run.finish()
