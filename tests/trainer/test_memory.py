"""Memory: rows that do not fit, and activations that are kept or offloaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ratchet.store.operation_records import JobProgress
from ratchet.store.records import Verdict
from ratchet.store.states import RoundState, TrajectoryState
from ratchet.store.store import Store
from ratchet.trainer.errors import OutOfMemory, SettingError
from ratchet.trainer.learner import gpu_memory, lm_head
from ratchet.trainer.learner.forward_pass import choose_attention
from ratchet.trainer.learner.lora_linear import use_fused_lora
from ratchet.trainer.learner.loss import RecordedGRPOTrainer
from ratchet.trainer.learner_api import RoundReport
from ratchet.trainer.local_learner import Learner
from ratchet.trainer.observability.progress import Progress
from ratchet.trainer.rows.token_row import TokenRow, split_by_budget
from ratchet.trainer.settings.learner_settings import LearnerSettings
from ratchet.trainer.settings.trainer_settings import TrainerSettings
from tests.harness.trainer.agents import agents_work
from tests.harness.trainer.scripted_engine import ScriptedEngine
from tests.harness.trainer.stepped_controller import SteppedController
from tests.harness.trainer.tiny import VOCABULARY, build_rows
from tests.trainer.test_learning_rate import RecordingLearner
from tests.trainer.test_loss_contract import WORST_RELATIVE_ERROR, Computed, backward, build_trainer, disturb


class Cramped(RecordingLearner):
    """A learner with memory for `capacity` padded tokens at once."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.budget = LearnerSettings().token_budget
        self.trained: list[list[int]] = []

    def train_round(self, rows: Sequence[TokenRow], rate_scale: float = 1.0) -> RoundReport:
        lengths = [len(row.ids) for row in rows]
        batches = split_by_budget(lengths, self.budget)
        if max(len(batch) * max(lengths[index] for index in batch) for batch in batches) > self.capacity:
            raise OutOfMemory("no memory for a round")
        self.trained.append(sorted(lengths))
        return super().train_round(rows, rate_scale)

    def load(self, folder: str | Path | None, settings: LearnerSettings) -> None:
        self.budget = settings.token_budget


@pytest.fixture
def make_cramped(store: Store, engine: ScriptedEngine, tmp_path: Path) -> Iterator[Callable[..., SteppedController]]:
    made: list[SteppedController] = []

    def make(cramped: Cramped, **changes: Any) -> SteppedController:
        values: dict[str, Any] = {
            "store": "s", "model": "agent", "base_model": "b", "vllm": (engine.url,), "judge": {"kind": "workflow"},
            "checkpoints": tmp_path / "checkpoints", "num_generations": 2, "groups_per_round": 1,
            "release": {"policy": "immediate"},
        }  # fmt: skip
        settings = TrainerSettings(**(values | changes))
        controller = SteppedController(settings, store, learner_factory=lambda given, folder: cramped)
        made.append(controller)
        controller._release.check(0.0)
        return controller

    yield make
    for controller in made:
        controller.close()


def judged(store: Store, task: str, lengths: Sequence[int]) -> list[str]:
    """One judged group of one-call trajectories whose rows have these lengths."""
    names = [
        agents_work(store, f"{task}{place}", [0.0], prompt=(5,) * (length - 3))[0]
        for place, length in enumerate(lengths)
    ]
    store.trajectories.seal_idle_trajectories("agent", now=100.0, idle_seconds=1.0)
    group = store.groups.create("k", "agent", names, now=101.0)
    store.groups.record_verdicts(
        group.id,
        [
            Verdict(
                trajectory_id=name, group_id=group.id, judge="j", judge_version="1", score=place % 2, judged_at=10.0
            )
            for place, name in enumerate(names)
        ],
    )
    return names


def states(store: Store, names: Sequence[str]) -> list[TrajectoryState]:
    return [store.trajectories.get(name).state for name in names]


def test_smaller_micro_batches_are_tried_first_and_cost_no_row(
    store: Store, make_cramped: Callable[..., SteppedController]
) -> None:
    names = judged(store, "a", [100, 100, 100, 100])
    learner = Cramped(capacity=250)
    controller = make_cramped(learner, learner=LearnerSettings(token_budget=800))
    assert [controller._train(1000.0), controller._train(1001.0)] == [True, True]
    assert learner.trained == [[100] * 4]
    assert set(states(store, names)) == {TrajectoryState.TRAINED}
    assert [held.state for held in store.rounds.page("agent")] == [RoundState.COMMITTED, RoundState.ABANDONED]


def test_the_row_that_does_not_fit_alone_is_left_out_and_the_round_goes_on(
    store: Store, make_cramped: Callable[..., SteppedController]
) -> None:
    names = judged(store, "a", [20, 30, 25, 900])
    learner = Cramped(capacity=100)
    controller = make_cramped(learner)
    for turn in range(4):
        assert controller._train(1000.0 + turn)
    assert learner.trained == [[20, 25, 30]]
    assert states(store, names) == [TrajectoryState.TRAINED] * 3 + [TrajectoryState.DROPPED]
    assert store.trajectories.get(names[3]).drop_reason == "too_long"
    (committed, *_) = store.rounds.page("agent")
    assert committed.metrics["untrained_tokens"] == {"too_long": 3}
    (alarm,) = (one for one in store.alarms.active() if one.name == "too_long:agent")
    assert "more than 899 tokens" in alarm.reason
    assert "max_length" in alarm.reason


def test_what_was_learnt_of_the_memory_outlives_the_trainer(
    store: Store, make_cramped: Callable[..., SteppedController]
) -> None:
    judged(store, "a", [20, 30, 25, 900])
    learner = Cramped(capacity=100)
    for _ in range(4):  # each start is killed after its first try
        make_cramped(learner)._train(1000.0)
    assert learner.trained == [[20, 25, 30]]


def test_where_nothing_fits_the_trainer_stops_and_its_groups_wait(
    store: Store, make_cramped: Callable[..., SteppedController]
) -> None:
    judged(store, "a", [200, 200, 200, 200])
    controller = make_cramped(Cramped(capacity=10))
    assert [controller._train(1000.0 + turn) for turn in range(4)] == [True] * 4
    with pytest.raises(OutOfMemory, match=r"none of the 4 rows .* 200 tokens"):
        controller._train(1004.0)
    assert len(store.groups.awaiting_round("agent")) == 1
    assert store.trajectories.drop_counts() == {}


def test_a_configured_max_length_needs_no_failed_rounds(
    store: Store, make_cramped: Callable[..., SteppedController]
) -> None:
    names = judged(store, "a", [20, 30, 25, 900])
    learner = Cramped(capacity=10_000)
    make_cramped(learner, learner=LearnerSettings(max_length=100))._train(1000.0)
    assert learner.trained == [[20, 25, 30]]
    assert store.trajectories.get(names[3]).drop_reason == "too_long"


def test_a_round_that_ran_out_of_memory_leaves_no_gradient_to_the_next(tiny_model: Path) -> None:
    settings = LearnerSettings(learning_rate=1e-3, token_budget=64, threads=1)
    rows = build_rows(6)
    fresh, other = (Learner(str(tiny_model), settings) for name in "ab")
    expected = fresh.train_round(rows)

    def meet_the_end(progress: JobProgress) -> None:
        if progress.done > 1 and not progress.ended:
            raise RuntimeError("CUDA out of memory")

    other.report_progress_to(Progress(meet_the_end))
    with pytest.raises(OutOfMemory):
        other.train_round(rows)
    other.report_progress_to(Progress())
    again = other.train_round(rows)
    assert (again.loss, again.grad_norm, again.weight_change) == (
        expected.loss, expected.grad_norm, expected.weight_change,
    )  # fmt: skip


LAYERS = 2


class Operators(TorchDispatchMode):
    """Counts operators, and records the largest tensor that one of them made."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}
        self.largest = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operator.__name__.split(".")[0]
        self.calls[name] = self.calls.get(name, 0) + 1
        made = operator(*args, **(kwargs or {}))
        sizes = [leaf.untyped_storage().nbytes() // 4 for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
        self.largest = max([self.largest, *sizes])
        return made

    @property
    def attention(self) -> int:
        return self.calls.get("_scaled_dot_product_flash_attention_for_cpu", 0)


def trained(settings: LearnerSettings, model: Path, folder: Path) -> tuple[Computed, Operators]:
    trainer = build_trainer(replace(settings, max_grad_norm=0.0), model, folder, budget=10_000)
    disturb(trainer, scale=0.03, seed=2)
    (micro,) = trainer.prepare(build_rows(4), only_step=True)
    with Operators() as counted:
        computed, _ = backward(trainer, [micro])
    return computed, counted


def test_a_checkpointed_layer_recomputes_all_but_attention(tiny_model: Path, tmp_path: Path) -> None:
    plain, direct = trained(LearnerSettings(gradient_checkpointing=False), tiny_model, tmp_path)
    ours, recomputed = trained(LearnerSettings(gradient_checkpointing=True), tiny_model, tmp_path)
    assert ours.relative_error(plain) < WORST_RELATIVE_ERROR
    assert recomputed.calls["silu"] == 2 * direct.calls["silu"]
    assert recomputed.attention == direct.attention == LAYERS


def test_offloaded_activations_change_no_gradient_and_leave_the_device(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _ = trained(LearnerSettings(gradient_checkpointing=False), tiny_model, tmp_path)
    monkeypatch.setattr(gpu_memory, "_LEAST_OFFLOADED", 100)
    moved: list[torch.Size] = []
    to_host = gpu_memory._to_host

    def recorded(tensor: torch.Tensor) -> Any:
        packed = to_host(tensor)
        if isinstance(packed, tuple):
            moved.append(tensor.shape)
        return packed

    monkeypatch.setattr(gpu_memory, "_to_host", recorded)
    settings = LearnerSettings(gradient_checkpointing=True, activation_offload=True)
    ours, counted = trained(settings, tiny_model, tmp_path)
    assert ours.relative_error(plain) < WORST_RELATIVE_ERROR
    assert counted.attention == 2 * LAYERS
    width = max(len(row.ids) for row in build_rows(4))
    assert moved.count(torch.Size((4, width, 64))) >= LAYERS  # the layers' inputs
    assert (VOCABULARY, 64) not in moved  # no weight


def test_auto_recomputes_only_the_layers_that_do_not_fit(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_memory, "checkpoints", lambda setting: True)
    trainer = build_trainer(LearnerSettings(max_grad_norm=0.0), tiny_model, tmp_path, budget=10_000)
    disturb(trainer, scale=0.03, seed=2)
    (micro,) = trainer.prepare(build_rows(4), only_step=True)

    def recomputed(free: float) -> tuple[Computed, int]:
        monkeypatch.setattr(gpu_memory, "free_bytes", lambda: free)
        trainer.model.zero_grad()
        with Operators() as counted:
            computed, _ = backward(trainer, [micro])
        return computed, counted.calls["silu"] - LAYERS

    measured, layers = recomputed(0)
    assert layers == LAYERS - 1  # the first pass measures one layer
    needed = trainer._pass._memory._bytes_per_token * micro["forwarded_ids"].numel()
    hidden = micro["forwarded_ids"].numel() * 64 * 4
    assert 10 * hidden < needed < 40 * hidden
    for free, expected in ((0, 2), (3.3 * needed, 2), (5.2 * needed, 1), (100 * needed, 0)):
        computed, layers = recomputed(free)
        assert layers == expected
        assert computed.relative_error(measured) < WORST_RELATIVE_ERROR


def test_offloading_without_checkpointing_is_refused() -> None:
    with pytest.raises(SettingError, match=r"activation_offload is True; it must be false, unless grad"):
        LearnerSettings(gradient_checkpointing=False, activation_offload=True)


def test_auto_checkpoints_with_a_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [gpu_memory.checkpoints(setting) for setting in ("auto", True, False)] == [False, True, False]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [gpu_memory.checkpoints(setting) for setting in ("auto", True, False)] == [True, True, False]


@contextmanager
def tiles(tokens: int, vocabulary: int) -> Iterator[None]:
    """Let the LM head compute tiles of this size; the real ones are 2,048 x 16,384."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm_head, "TOKEN_TILE", tokens)
        patch.setattr(lm_head, "VOCABULARY_TILE", vocabulary)
        yield


@pytest.mark.parametrize("settings", [LearnerSettings(), LearnerSettings(beta=0.05)], ids=["plain", "kl"])
def test_the_logits_of_the_vocabulary_are_never_whole(
    settings: LearnerSettings, tiny_model: Path, tmp_path: Path
) -> None:
    """In the old policy's pass, the reference's, the loss, its gradient and the scores."""
    rows = [TokenRow(f"t{n}", tuple(range(n, n + 40)), (0, *(1,) * 39), (-6.2,) * 40, n - 12.0) for n in range(24)]
    trainer = build_trainer(settings, tiny_model, tmp_path, budget=100_000)
    logits = len(rows) * 39 * VOCABULARY
    everything_else = len(rows) * 40 * 2 * 64  # the largest activation: of the MLP
    assert logits > 3 * everything_else

    def run(trainer: RecordedGRPOTrainer) -> list[list[float]]:
        backward(trainer, trainer.prepare(rows, only_step=False))
        return trainer.score(rows)

    with tiles(16, 64), Operators() as tiled:
        scores = run(trainer)
    assert tiled.largest <= everything_else
    with Operators() as whole:
        assert [row[-1] for row in run(trainer)] == pytest.approx([row[-1] for row in scores], abs=1e-5)
    assert whole.largest >= logits  # a tile of the real size holds all of so few


def test_rows_end_to_end_give_the_gradient_of_padded_rows(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashAttention runs on GPUs only: here transformers' SDPA finds the rows' ends by the same positions."""
    padded, _ = trained(LearnerSettings(share_prefixes=False), tiny_model, tmp_path)
    monkeypatch.setattr("ratchet.trainer.learner.forward_pass.ForwardPass.padding_free", True)
    trainer = build_trainer(
        LearnerSettings(max_grad_norm=0.0, share_prefixes=False), tiny_model, tmp_path, budget=10_000
    )
    disturb(trainer, scale=0.03, seed=2)
    rows = build_rows(4)
    (micro,) = trainer.prepare(rows, only_step=True)
    lengths = [len(row.ids) for row in rows]
    assert micro["forwarded_ids"].shape == (1, sum(lengths))
    assert sorted(micro["cu_seq_lens"].diff().tolist()) == sorted(lengths)
    assert int(micro["max_length"]) == max(lengths)
    ours, _ = backward(trainer, [micro])
    assert ours.relative_error(padded) < WORST_RELATIVE_ERROR


def test_flash_attention_where_it_is_not_installed_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"'flash_attention_2', which needs a GPU and the package flash-attn"):
        build_trainer(LearnerSettings(attn_implementation="flash_attention_2"), tiny_model, tmp_path)


def test_auto_takes_flash_attention_only_where_it_is_installed_and_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[str] = []

    class ModelWithoutFlash:
        _supports_flash_attn = True
        set_attn_implementation = staticmethod(chosen.append)

    choose_attention(ModelWithoutFlash(), "auto")
    assert chosen == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("ratchet.trainer.learner.forward_pass.is_flash_attn_2_available", lambda: True)
    choose_attention(ModelWithoutFlash(), "auto")
    assert chosen == ["flash_attention_2"]
    ModelWithoutFlash._supports_flash_attn = False
    choose_attention(ModelWithoutFlash(), "auto")
    assert chosen == ["flash_attention_2"]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
def test_the_fused_adapter_computes_what_peft_does(bias: bool, autocast: bool) -> None:
    def build() -> Any:
        torch.manual_seed(0)
        network = torch.nn.Sequential(torch.nn.Linear(48, 80, bias=bias), torch.nn.SiLU(), torch.nn.Linear(80, 32))
        network.to(torch.bfloat16 if autocast else torch.float32)
        model = get_peft_model(
            network, LoraConfig(r=4, lora_alpha=12, target_modules=["0", "2"], init_lora_weights=False)
        )
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        return model

    def run(model: Any) -> list[torch.Tensor]:
        torch.manual_seed(1)
        x = torch.randn(3, 7, 48, dtype=torch.bfloat16 if autocast else torch.float32, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = model(x)
            with torch.no_grad(), model.disable_adapter():
                without = model(x)
        (out.float() ** 2).sum().backward()
        return [out, without, x.grad, *(p.grad for p in model.parameters() if p.requires_grad)]

    fused = build()
    assert use_fused_lora(fused) == 2
    tolerance = 3e-2 if autocast else 1e-5
    for ours, theirs in zip(run(fused), run(build()), strict=True):
        assert (ours.float() - theirs.float()).norm() <= tolerance * theirs.float().norm()


def test_layers_that_are_not_plain_keep_pefts_forward() -> None:
    def fused(**fields: Any) -> int:
        model = torch.nn.Sequential(torch.nn.Linear(8, 8))
        return use_fused_lora(get_peft_model(model, LoraConfig(r=2, target_modules=["0"], **fields)))

    assert [fused(), fused(lora_dropout=0.1), fused(use_dora=True), fused(lora_bias=True)] == [1, 0, 0, 0]


def test_a_base_of_another_dtype_without_autocast_is_computed_by_peft(tmp_path: Path) -> None:
    model: Any = torch.nn.Sequential(torch.nn.Linear(8, 8, dtype=torch.bfloat16))
    adapted: Any = get_peft_model(model, LoraConfig(r=2, target_modules=["0"], init_lora_weights=False))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    expected = adapted(x)
    use_fused_lora(adapted)
    assert torch.equal(adapted(x), expected)
