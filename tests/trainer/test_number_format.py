"""Claims about the number format that the learner computes in, and what of a step it shows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ratchet.trainer.errors import SettingError
from ratchet.trainer.learner import base_model
from ratchet.trainer.learner.learner import Learner
from ratchet.trainer.settings.learner_settings import LearnerSettings
from tests.harness.trainer.tiny import build_rows

ROWS = build_rows(4)


def make_learner(model: Path, folder: Path, dtype: str, **settings: float) -> Learner:
    return Learner(str(model), LearnerSettings(dtype=dtype, threads=1, **settings), workdir=folder / dtype)  # type: ignore[arg-type]


def test_a_cpu_learner_computes_and_saves_in_the_format_that_is_set(tiny_model: Path, tmp_path: Path) -> None:
    found = {}
    for dtype in ("auto", "float32", "bfloat16"):
        learner = make_learner(tiny_model, tmp_path, dtype, learning_rate=1e-2)
        base = learner.score(ROWS)
        report = learner.train_round(ROWS)
        learner.save(tmp_path / f"saved-{dtype}")
        adapter = load_file(tmp_path / f"saved-{dtype}" / "adapter_model.safetensors")
        found[dtype] = base, report.dtype, {weight.dtype for weight in adapter.values()}
        assert {p.dtype for p in learner.host.trainer.lora_parameters().values()} == {torch.float32}
        assert learner.score(ROWS, adapter=tmp_path / f"saved-{dtype}") == learner.score(ROWS)
    assert found["auto"] == found["float32"]
    assert found["float32"][1:] == ("fp32", {torch.float32})
    assert found["bfloat16"][1:] == ("bf16", {torch.bfloat16})
    gaps = [one - other for fine, coarse in zip(found["float32"][0], found["bfloat16"][0], strict=True)
            for one, other in zip(fine, coarse, strict=True)]  # fmt: skip
    assert 1e-4 < max(map(abs, gaps)) < 0.2


def test_an_unknown_format_and_an_agent_with_another_one_than_its_learner_are_refused(
    tiny_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(SettingError, match=r"dtype is 'half'; it must be one of auto, bfloat16, float32"):
        LearnerSettings(dtype="half")
    learner = make_learner(tiny_model, tmp_path, "float32")
    with pytest.raises(SettingError, match="learner setting dtype cannot change while the learner runs"):
        learner.load(None, LearnerSettings(dtype="bfloat16"))


def test_weights_are_read_straight_onto_the_device(tiny_model: Path) -> None:
    """The device `meta` takes no weights: none of them was whole on the CPU first."""
    for device in ("cpu", "meta"):
        model, _ = base_model.load(str(tiny_model), dtype=torch.bfloat16, device=torch.device(device))
        assert {(weight.device.type, weight.dtype) for weight in model.parameters()} == {(device, torch.bfloat16)}
        assert not any(hasattr(module, "_hf_hook") for module in model.modules())  # they would copy every input
