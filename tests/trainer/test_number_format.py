"""Claims about the number format that the learner computes in, and what of a step it shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ratchet.settings.project_settings import Settings
from ratchet.store.reports.learning_report import movement_of
from ratchet.trainer.errors import SettingError
from ratchet.trainer.learner import base_model
from ratchet.trainer.learner.agent_state import local
from ratchet.trainer.learner.host import Learner
from ratchet.trainer.learner.training_round import measure_policy_shift
from ratchet.trainer.learner_api import RoundReport
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.learner_settings import LearnerSettings
from tests.harness.trainer.tiny import build_rows, build_tiny_model

ROWS = build_rows(4)
# The rows are of no policy's sampling.
UNCORRECTED = {"sequence_mask_threshold": None, "vllm_importance_sampling_clip_max": None}


@pytest.fixture(scope="module")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose layers and logits (up to 20) are as large as those of a pretrained one."""
    folder = build_tiny_model(tmp_path_factory.mktemp("deep"), hidden=128, layers=12)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith("model.norm.weight"):
            weight *= 10
        elif weight.dim() > 1 and "embed" not in name and "lm_head" not in name:
            weight *= 3
    save_file(
        {name: weight.bfloat16() for name, weight in weights.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    return folder


def make_learner(model: Path, dtype: str, **settings: float | None) -> Learner:
    return Learner(str(model), LearnerSettings(dtype=dtype, threads=1, **settings))  # type: ignore[arg-type]


def test_a_cpu_learner_computes_and_saves_in_the_format_that_is_set(tiny_model: Path, tmp_path: Path) -> None:
    found = {}
    for dtype in ("auto", "float32", "bfloat16"):
        learner = make_learner(tiny_model, dtype, learning_rate=1e-2)
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


def test_an_unknown_format_and_an_agent_with_another_one_than_its_learner_are_refused(tiny_model: Path) -> None:
    with pytest.raises(SettingError, match=r"dtype is 'half'; it must be one of auto, bfloat16, float32"):
        LearnerSettings(dtype="half")
    learner = make_learner(tiny_model, "float32")
    learner.load(None, LearnerSettings())  # auto: what the learner has
    with pytest.raises(SettingError, match="dtype cannot change"):
        learner.load(None, LearnerSettings(dtype="bfloat16"))


def test_weights_are_read_straight_onto_the_device(tiny_model: Path) -> None:
    """The device `meta` takes no weights: none of them was whole on the CPU first."""
    for device in ("cpu", "meta"):
        model, _ = base_model.load(str(tiny_model), dtype=torch.bfloat16, device=torch.device(device))
        assert {(weight.device.type, weight.dtype) for weight in model.parameters()} == {(device, torch.bfloat16)}
        assert not any(hasattr(module, "_hf_hook") for module in model.modules())  # they would copy every input


@pytest.mark.parametrize(
    ("vllm", "learner", "found"),
    [
        ({}, {}, "auto"),
        ({"dtype": "bfloat16"}, {}, "bfloat16"),
        ({"dtype": "bfloat16"}, {"dtype": "auto"}, "bfloat16"),
        ({"dtype": "bfloat16"}, {"dtype": "float32"}, "float32"),
        ({"dtype": "float16"}, {}, "auto"),  # the learner has no such format
    ],
)
def test_a_learner_sees_what_is_served_unless_its_own_format_is_set(
    vllm: dict[str, str], learner: dict[str, str], found: str
) -> None:
    settings = Settings.of({"vllm": vllm, "learner": learner})
    assert settings.learner.dtype == found


def in_both_formats(model: Path, rate: float, steps: int) -> Iterator[tuple[RoundReport, float, float]]:
    """A bf16 learner's rounds: its report, and the movement of the same adapters in fp32: k3, and the share that bf16
    shows of it.
    """
    seen, truth = (make_learner(model, dtype, learning_rate=rate, **UNCORRECTED) for dtype in ("bfloat16", "float32"))
    rows = build_rows(12)
    for _ in range(steps):
        old = [logprobs(learner, rows) for learner in (seen, truth)]
        report = seen.train_round(rows)
        pairs = zip(truth.host.trainer.lora_parameters().values(), seen.host.trainer.lora_parameters().values(),
                    strict=True)  # fmt: skip
        for ours, theirs in pairs:
            ours.data.copy_(theirs.data)
        shown, true = (logprobs(one, rows) - before for one, before in zip((seen, truth), old, strict=True))
        yield report, float((true.exp() - 1 - true).mean()), float((shown * true).mean() / true.square().mean())


def logprobs(learner: Learner, rows: Sequence[TokenRow]) -> torch.Tensor:
    scored = zip(rows, learner.score(rows), strict=True)
    return torch.tensor([one for row, found in scored for one, on in zip(found, row.mask, strict=True) if on]).double()


@pytest.mark.parametrize("rate", [1e-6, 1e-5])
def test_a_step_that_bf16_does_not_show_reads_as_its_floor_and_is_not_called_healthy(
    rate: float, deep_model: Path
) -> None:
    for report, true, _ in in_both_formats(deep_model, rate, steps=3):
        assert true < report.approx_kl / 10
        assert report.approx_kl < 1.5 * report.approx_kl_floor
        movement = movement_of(report.figures())
        assert movement is not None
        assert movement.size == "lost in rounding"


def test_a_step_above_the_floor_is_read_as_it_is_and_its_share_is_what_bf16_shows(deep_model: Path) -> None:
    shares = []
    for report, true, share in in_both_formats(deep_model, 1e-4, steps=4):
        shares.append((report.logprob_change_share, share))
        above = report.approx_kl - report.approx_kl_floor
        assert above == pytest.approx(share**2 * true, rel=0.4)
    assert all(estimate == pytest.approx(share, rel=0.25, abs=0.05) for estimate, share in shares)
    assert shares[0][1] < 0.6 < 0.75 < shares[-1][1]  # more of each step shows as the adapter grows


def test_the_floor_of_fp32_is_far_below_every_step_and_all_of_it_shows(tiny_model: Path) -> None:
    learner = make_learner(tiny_model, "float32", learning_rate=1e-4)
    for _ in range(2):
        report = learner.train_round(ROWS)
        assert report.approx_kl_floor < report.approx_kl / 1000
        assert report.logprob_change_share == 1.0


def test_measuring_a_round_leaves_its_adapter_bit_for_bit(tiny_model: Path) -> None:
    learner = make_learner(tiny_model, "bfloat16", learning_rate=1e-3)
    learner.train_round(ROWS)
    trainer = learner.host.trainer
    before = {name: local(p.detach()).clone() for name, p in trainer.lora_parameters().items()}
    old = {name: torch.zeros_like(weight) for name, weight in before.items()}
    dice = torch.get_rng_state()
    measure_policy_shift(trainer, trainer.shift_sample(ROWS), old, coarse=True)
    assert all(local(p).equal(before[name]) for name, p in trainer.lora_parameters().items())
    assert torch.get_rng_state().equal(dice)
