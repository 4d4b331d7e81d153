"""A fake nvidia-smi: a program of that name that lists GPUs of a chosen size, for machines without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratchet.supervisor import vllm_command
from ratchet.trainer.settings.learner_settings import VARIABLE


def install(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, total_mib: int, gpus: int = 1, used_mib: int = 10
) -> None:
    """Put the program first on PATH; every GPU has so much memory. No variable hides one."""
    program = folder / "nvidia-smi"
    rows = "".join(f"{index}, GPU-{index}, {total_mib}, {used_mib}\\n" for index in range(gpus))
    program.write_text(f"#!/bin/sh\ncase \"$1\" in\n  --query-gpu*) printf '{rows}' ;;\n  -L) echo fake ;;\nesac\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.delenv(VARIABLE, raising=False)
    vllm_command.has_gpu.cache_clear()
