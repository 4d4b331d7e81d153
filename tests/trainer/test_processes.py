"""Claims about training in several processes, with real ones that `accelerate launch` starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.one_of_several import main
from trainer.learning.learner_settings import LearnerSettings

# Three micro-batches and more: one process has fewer of them than the other.
SETTINGS = {"threads": 1, "token_budget": 120, "learning_rate": 1e-3, "steps_per_round": 2, "loss": "grpo", "kl": 0.01}


def test_two_processes_learn_what_one_does(tiny_model: Path, tmp_path: Path) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    alone.mkdir()
    together.mkdir()
    main(str(tiny_model), alone, LearnerSettings(**SETTINGS))  # type: ignore[arg-type]
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    launch += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    program = ["-m", "tests.trainer.one_of_several", str(tiny_model), str(together), json.dumps(SETTINGS)]
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        launch + program, cwd=root, env=environment, capture_output=True, text=True, timeout=180, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    expected = json.loads((alone / "0.json").read_text())
    for rank in (0, 1):
        found = json.loads((together / f"{rank}.json").read_text())
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            assert found[name] == pytest.approx(values, rel=1e-4, abs=1e-6), name
    ours, theirs = (load_file(folder / "0001" / "learner" / "lora.safetensors") for folder in (alone, together))
    gap = torch.cat([(ours[name] - theirs[name]).flatten() for name in ours])
    size = torch.cat([tensor.flatten() for tensor in ours.values()])
    assert float(gap.norm() / size.norm()) < 1e-4
