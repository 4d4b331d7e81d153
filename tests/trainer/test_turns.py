"""Rewards of single turns, and prefixes that the rows of a group share."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ratchet.store.records import Verdict
from ratchet.store.states import CallState
from ratchet.store.store import Store
from ratchet.trainer.advantages import turn_advantages
from ratchet.trainer.learner import forward_pass
from ratchet.trainer.learner.forward_pass import MAX_TREE_TOKENS, pack_rows, prefix_tree
from ratchet.trainer.local_learner import Learner
from ratchet.trainer.rows.build_rows import build_rows
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.learner_settings import LearnerSettings
from tests.harness.trainer.agents import agents_work
from tests.harness.trainer.tiny import VOCABULARY, build_row, build_tokenizer
from tests.trainer.test_loss_contract import WORST_RELATIVE_ERROR, backward, build_trainer, disturb
from tests.trainer.test_roles import verdicts
from tests.trainer.test_rows import call, choice

if TYPE_CHECKING:
    from tests.harness.trainer.stepped_controller import SteppedController


def verdicts_of(*turns: list[float]) -> list[Verdict]:
    """Verdicts of equal scores, with what was said of each one's turns."""
    return [verdicts([0.5], **{f"turn:{number}": [score] for number, score in enumerate(each, 1)})[0] for each in turns]


def test_turns_are_compared_with_all_turns_of_the_group() -> None:
    found = turn_advantages(verdicts_of([1.0, 0.0], [0.5]), "dr_grpo", 2.0)
    assert found == [{1: pytest.approx(1.0), 2: pytest.approx(-1.0)}, {1: pytest.approx(0.0)}]


@pytest.mark.parametrize(
    ("turns", "weight"),
    [([[1.0], [0.0]], 0.0), ([[1.0], []], 1.0), ([[1.0, 0.0]], 1.0), ([[1.0], [1.0]], 1.0)],
    ids=["no weight", "a member without", "a single", "all the same"],
)
def test_where_nothing_can_be_compared_turns_earn_nothing(turns: list[list[float]], weight: float) -> None:
    assert not any(any(each.values()) for each in turn_advantages(verdicts_of(*turns), "grpo", weight))


def test_a_turns_advantage_reaches_the_tokens_of_its_own_call_in_the_same_row() -> None:
    calls = [
        call("1", (1, 2), choice((3, 4))),
        call("2", (5,), choice((6,)), parent_call="1", context="exact"),
        call("3", (7,), choice((8,)), parent_call="2", context="exact"),
    ]
    (row,) = build_rows("t", calls, 0.5, by_turn={1: 1.0, 3: -2.0}).rows
    assert row.advantages is not None
    assert [a for a, trained in zip(row.advantages, row.mask, strict=True) if trained] == [1.5, 1.5, 0.5, -1.5]
    (plain,) = build_rows("t", calls, 0.5).rows
    assert plain.advantages is None


def test_a_group_of_equal_scores_is_trained_by_its_turns(
    store: Store, make_controller: Callable[..., SteppedController]
) -> None:
    by_turn = [{"score": 0.5, "components": {"turn:1": score}} for score in (0.0, 1.0)]
    agents_work(store, "a", by_turn)
    make_controller(turn_weight=0.5, groups_per_round=1).step(1000.0)
    (held,) = store.rounds.page("agent")
    assert held.metrics["tokens_trained"] == 6
    assert held.metrics["weight_change"] > 0


def test_turns_are_counted_without_failed_and_repeated_calls() -> None:
    calls = [
        call("1", (1, 2), choice((3,)), prompt_node="a"),
        call("failed", (5,), parent_call="1", context="exact", prompt_node="b", state=CallState.FAILED, status=500),
        call("lost", (5,), choice((6,)), parent_call="1", context="exact", prompt_node="b"),
        call("2", (5,), choice((7,)), parent_call="1", context="exact", prompt_node="b", linked_by="retry"),
        call("3", (8,), choice((9,)), parent_call="2", context="exact", prompt_node="c"),
    ]
    (row,) = build_rows("t", calls, 0.0, by_turn={1: 1.0, 2: 2.0, 3: 3.0}).rows
    assert row.advantages is not None
    assert [a for a, trained in zip(row.advantages, row.mask, strict=True) if trained] == [1.0, 2.0, 3.0]


BUDGET = 400


def group(seed: int, size: int = 4) -> list[TokenRow]:
    """Rows that share a prompt, some of them a first answer as well; one of them is there twice."""
    dice = random.Random(seed)
    prompt = [dice.randrange(3, VOCABULARY) for _ in range(60)]
    first = [dice.randrange(3, VOCABULARY) for _ in range(9)]
    rows = []
    for member in range(size):
        own = build_row(10 * seed + member, temperature=dice.choice([1.0, 0.7]))
        shared, mask = (prompt + first, [0] * 60 + [1] * 9) if member % 2 else (prompt, [0] * 60)
        logprobs = [-6.2 * m for m in mask]
        rows.append(
            replace(
                own,
                ids=(*shared, *own.ids),
                mask=(*mask, *own.mask),
                logprobs=(*logprobs, *own.logprobs),
                importance=member != 2,
            )
        )
    return [*rows, replace(rows[1], trajectory_id="twice", advantage=-0.5)]


def groups() -> list[TokenRow]:
    """Two groups, and rows that share nothing."""
    return [*group(1), *group(2), build_row(77), build_row(78)]


def gradient(settings: LearnerSettings, model: Path, folder: Path, *, shared: bool) -> Any:
    trainer = build_trainer(replace(settings, share_prefixes=shared), model, folder, budget=BUDGET)
    micros = trainer.prepare(groups(), only_step=settings.steps_per_round == 1)
    assert any("until" in micro for micro in micros) == shared
    if settings.steps_per_round > 1:
        disturb(trainer, scale=0.03, seed=2)
    return backward(trainer, micros)


@pytest.mark.slow
@pytest.mark.parametrize(
    "chosen",
    [
        *({"loss_type": name} for name in ("dapo", "gspo", "dr_grpo", "cispo", "distillation", "sft")),
        {"loss_type": "grpo", "beta": 0.05},
        {"loss_type": "grpo", "beta": 0.05, "steps_per_round": 2},
        {"loss_type": "dapo", "entropy_coef": 0.01, "top_entropy_quantile": 0.3},
        {"loss_type": "dapo", "gradient_checkpointing": True},
    ],
    ids=lambda chosen: "-".join(map(str, chosen.values())),
)
def test_loss_and_gradient_are_those_of_the_rows_apart(
    chosen: dict[str, Any], tiny_model: Path, tmp_path: Path
) -> None:
    settings = LearnerSettings(max_grad_norm=0, sequence_mask_threshold=1.03, **chosen)
    apart, alone = gradient(settings, tiny_model, tmp_path, shared=False)
    ours, numbers = gradient(settings, tiny_model, tmp_path, shared=True)
    assert ours.relative_error(apart) < WORST_RELATIVE_ERROR
    assert (numbers.rows_rejected, numbers.tokens) == (alone.rows_rejected, alone.tokens)
    assert bool(numbers.rows_rejected) == (settings.objective.ratio != "none")
    assert numbers.entropy_sum == pytest.approx(alone.entropy_sum, rel=1e-4)
    assert numbers.tokens_forwarded < 0.7 * alone.tokens_forwarded


@pytest.mark.slow
@pytest.mark.parametrize("kind", forward_pass.SHARING_MODEL_TYPES)
def test_every_model_that_shares_gives_the_gradient_of_the_rows_apart(kind: str, tmp_path: Path) -> None:
    model = of_kind(kind, tmp_path / "model")
    apart, _ = gradient(LearnerSettings(max_grad_norm=0), model, tmp_path, shared=False)
    ours, _ = gradient(LearnerSettings(max_grad_norm=0), model, tmp_path, shared=True)
    assert ours.relative_error(apart) < WORST_RELATIVE_ERROR


@pytest.mark.parametrize(("kind", "windowed"), [("gemma2", {}), ("mistral", {"sliding_window": 32})])
def test_rows_stay_apart_where_attention_is_windowed(kind: str, windowed: dict[str, Any], tmp_path: Path) -> None:
    trainer = build_trainer(LearnerSettings(), of_kind(kind, tmp_path / "model", **windowed), tmp_path, budget=BUDGET)
    assert not any("until" in micro for micro in trainer.prepare(groups()))


def test_scores_are_those_of_the_rows_apart(tiny_model: Path) -> None:
    pack_rows, apart = (
        Learner(str(tiny_model), LearnerSettings(threads=1, share_prefixes=shared)) for shared in (True, False)
    )
    rows = groups()
    for row, ours, theirs in zip(rows, pack_rows.score(rows), apart.score(rows), strict=True):
        assert len(ours) == len(row.ids)
        assert ours == pytest.approx(theirs, abs=1e-4)


def test_a_tree_has_no_more_tokens_than_its_mask_can_have_whatever_the_budget() -> None:
    rows = [[1] * 3000 + [number] * 1500 for number in range(2, 9)]
    packs = pack_rows(rows, max_length=32768, pairs_per_token=1e6)
    lengths = [len(prefix_tree([rows[index] for index in pack]).ids) for pack in packs]
    assert max(lengths) <= MAX_TREE_TOKENS < sum(lengths)
    assert [len(pack) for pack in packs] == [3, 3, 1]
    assert pack_rows([[1] * 20_000], max_length=32768, pairs_per_token=1e6) == [[0]]  # a single row needs no mask


def test_a_token_sees_the_earlier_tokens_of_its_own_row_and_nothing_else() -> None:
    dice = random.Random(3)
    rows = sorted([dice.randrange(2) for _ in range(dice.randint(1, 12))] for _ in range(40))
    laid = prefix_tree(rows)
    assert len(laid.ids) == len({tuple(row[: end + 1]) for row in rows for end in range(len(row))})
    for row, path in zip(rows, laid.paths, strict=True):
        assert [laid.ids[place] for place in path] == row
        for position, place in enumerate(path):
            assert laid.positions[place] == position
            seen = [other for other in range(place + 1) if place < laid.until[other]]
            assert seen == path[: position + 1]


def test_rows_are_put_together_only_where_that_is_cheaper_and_within_the_budget() -> None:
    def rows(prompt: int, answer: int) -> list[Sequence[int]]:
        return [[7] * prompt + [100 + member] * answer for member in range(8)]

    assert pack_rows(rows(1000, 100), max_length=8192, pairs_per_token=5000) == [list(range(8))]
    assert pack_rows(rows(1000, 100), max_length=1500, pairs_per_token=5000) == [[0, 1, 2, 3, 4], [5, 6, 7]]
    assert pack_rows(rows(10, 2000), max_length=100_000, pairs_per_token=5000) == [[member] for member in range(8)]
    assert pack_rows([[member] * 50 for member in range(8)], max_length=8192, pairs_per_token=5000) == [
        [m] for m in range(8)
    ]


def of_kind(kind: str, folder: Path, **fields: Any) -> Path:
    """A tiny random model of an architecture."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        kind, vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=1024, pad_token_id=0,
        **({"sliding_window": None} | fields if kind in ("mistral", "phi3") else fields),
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder
