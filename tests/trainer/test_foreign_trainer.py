"""A trainer that knows nothing of Ratchet learns from an export: docs/storage.md's own lines are run."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from ratchet.cli import run
from ratchet.store.store import Store
from tests.harness.records import answered_trajectory, judged_group

DOCUMENT = Path(__file__).parents[2] / "docs" / "storage.md"


def test_the_documents_loop_takes_a_step_on_exported_rows_and_none_of_them_is_a_measurement(
    store: Store,
    store_file: Path,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    judged_group(store, ["a", "b"], [0.0, 1.0])
    answered_trajectory(store, "measured", purpose="eval")
    answered_trajectory(store, "held-out", task="kept back")
    store.trajectories.seal_idle_trajectories("agent", now=100.0, idle_seconds=1.0)
    store.trajectories.drop(["held-out"], "held_out")
    assert run(["store", "export", "--store", str(store_file), "--format", "trl", "--out", "trained.jsonl"]) == 0
    stderr = capsys.readouterr().err
    assert "1 measurements (purpose eval or other) skipped: not training data" in stderr
    assert "1 of held-out tasks (trainer.release.held_out_share) skipped: not training data" in stderr
    rows = [json.loads(line) for line in Path("trained.jsonl").read_text().splitlines()]
    assert {row["trajectory_id"] for row in rows} == {"a", "b"}
    (loop,) = [code for code in re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.S) if "AdamW" in code]
    names: dict[str, Any] = {}
    exec(loop.replace("BASE_MODEL", str(tiny_model)), names)
    before = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).state_dict()
    moved = [name for name, weights in names["model"].state_dict().items() if not torch.equal(weights, before[name])]
    assert moved
    assert torch.isfinite(names["loss"])
