"""The whole circle on a real pretrained model: a short form of `make demo-real`, of a few rounds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ratchet.demo.pretrained_model import END_OF_TURN, cache_folder
from tests.harness.cli.project import ROOT


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any], Path]:
    """One short demo: (what it printed, result.json, its folder). The model stays in the user's cache."""
    folder = tmp_path_factory.mktemp("state")
    command = [
        sys.executable, "-m", "ratchet", "demo", "--real", "--minutes", "3", "--held-out-tasks", "20",
        "--held-out-attempts", "1", "--state-dir", str(folder), "--set", "trainer.groups_per_round=8",
        "--set", "trainer.seal_after_idle_seconds=1",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    output = done.stdout + done.stderr
    assert done.returncode in (0, 1), output[-4000:]  # 1: a few rounds need not be enough to learn
    assert (folder / "demo-real" / "result.json").exists(), output[-4000:]
    return output, json.loads((folder / "demo-real" / "result.json").read_text()), folder / "demo-real"


@pytest.mark.e2e
def test_versions_of_a_real_model_are_proven_and_served_and_no_call_fails(demo: Any) -> None:
    output, result, folder = demo
    assert result["versions_proven"] >= 2, output[-4000:]
    # The last one may still be a candidate when the run ends.
    assert not {row["state"] for row in result["rounds"]} & {"unproven", "rejected"}
    assert result["swaps"] >= 2
    assert (result["failed_calls"], result["mixed_version_trajectories"]) == (0, 0)
    assert result["tokens_trained_from_engine"] == result["tokens_trained"] > 100
    assert (folder / "learning_curve.png").exists()


@pytest.mark.e2e
def test_vllm_and_the_learner_compute_the_same_logprobs_of_a_real_model(demo: Any) -> None:
    _, result, _ = demo
    proofs = [proof for row in result["rounds"] for proof in row["proofs"] if "slope" in proof]
    assert all(proof["served_vs_trainer"] < 0.01 for proof in proofs)


@pytest.mark.e2e
def test_the_model_folder_is_plain_and_ends_its_turns(demo: Any) -> None:
    folder = cache_folder()
    assert not folder.is_relative_to(ROOT)
    assert json.loads((folder / "tokenizer_config.json").read_text())["eos_token"] == END_OF_TURN
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
