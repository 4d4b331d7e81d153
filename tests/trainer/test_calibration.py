"""Calibration: what a judge is worth against the truth, and whether places sway it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ratchet.store.records import Verdict
from ratchet.store.store import Store
from ratchet.trainer.controller.agent_controller import ASSUMED_NOISE, judge_noise
from ratchet.trainer.judges.quality import (
    CalibrationGroup,
    calibrate,
    score_noise,
)
from ratchet.trainer.settings.trainer_settings import TrainerSettings
from ratchet.trainer.statistics import kendall_tau_b, score_differences


def verdicts(scores: Mapping[str, float | None]) -> list[Verdict]:
    return [
        Verdict(trajectory_id=name, group_id="g", judge="j", judge_version="1", score=score,
                failure=None if score is not None else "no answer")
        for name, score in scores.items()
    ]  # fmt: skip


def calibration_group(
    truth: Mapping[str, float], first: Mapping[str, float | None], reverse: Mapping[str, float | None]
) -> CalibrationGroup:
    return CalibrationGroup(verdicts(truth), verdicts(first), verdicts(reverse))


TRUTH = {"a": 1.0, "b": 0.0, "c": 0.0}


def test_a_judge_that_is_right_agrees_wholly_and_is_not_swayed() -> None:
    found = calibrate([calibration_group(TRUTH, {"a": 0.9, "b": 0.2, "c": 0.1}, {"a": 0.9, "b": 0.2, "c": 0.1})] * 10)
    assert (found.agreement, found.pairs, found.swapped, found.moved) == (1.0, 20, 0.0, 0.0)
    assert found.low == pytest.approx(0.839, abs=0.001)
    assert found.gap == pytest.approx(0.75)


def test_a_judge_that_likes_the_first_place_is_found_out_by_the_swap() -> None:
    first, last = {"a": 0.9, "b": 0.5, "c": 0.1}, {"a": 0.1, "b": 0.5, "c": 0.9}
    found = calibrate([calibration_group(TRUTH, first, last)])
    assert (found.agreement, found.swapped) == (1.0, 1.0)
    assert found.moved == pytest.approx(1.6 / 3)


def test_a_coin_agrees_with_half() -> None:
    coin = random.Random(1)
    groups = []
    for _ in range(300):
        scores = {name: coin.random() for name in TRUTH}
        groups.append(calibration_group(TRUTH, scores, scores))
    found = calibrate(groups)
    assert found.low is not None
    assert found.high is not None
    assert found.low < 0.5 < found.high
    assert found.tau == pytest.approx(0.0, abs=0.1)


def test_a_judge_that_says_the_same_of_all_counts_half() -> None:
    flat = dict.fromkeys(TRUTH, 0.5)
    found = calibrate([calibration_group(TRUTH, flat, flat)])
    assert (found.agreement, found.tau, found.swapped) == (0.5, None, None)


def test_failures_are_counted_and_never_scored() -> None:
    found = calibrate([calibration_group(TRUTH, {"a": None, "b": 0.1, "c": 0.2}, {"a": 0.9, "b": 0.1, "c": 0.2})])
    assert (found.failures, found.trajectories, found.pairs, found.agreement) == (1, 2, 0, None)


def test_kendalls_tau_counts_pairs() -> None:
    one = {"a": 1.0, "b": 2.0, "c": 3.0}
    assert kendall_tau_b(score_differences(one, one)) == 1.0
    assert kendall_tau_b(score_differences(one, {"a": 3.0, "b": 2.0, "c": 1.0})) == -1.0
    assert kendall_tau_b(score_differences(one, {"a": 1.0, "b": 3.0, "c": 2.0})) == pytest.approx(1 / 3)
    assert kendall_tau_b(score_differences(one, dict.fromkeys(one, 1.0))) is None
    assert kendall_tau_b(score_differences(one, {"z": 1.0})) is None


def test_the_noise_of_a_judge_is_measured_within_groups_from_repeated_scores() -> None:
    dice = random.Random(3)
    groups = []
    for _ in range(200):
        mood = dice.gauss(0, 0.2)  # of the second judgement: all members share it
        first = {name: value + dice.gauss(0, 0.05) for name, value in TRUTH.items()}
        second = {name: value + mood + dice.gauss(0, 0.05) for name, value in TRUTH.items()}
        groups.append(CalibrationGroup((), verdicts(first), verdicts(second)))
    found = score_noise(groups)
    assert found is not None
    assert found.noise == pytest.approx(0.05, rel=0.1)
    assert (found.groups, found.trajectories) == (200, 600)
    exact = score_noise([calibration_group(TRUTH, TRUTH, TRUTH)])
    assert exact is not None
    assert exact.noise == 0.0
    assert score_noise([calibration_group(TRUTH, {"a": 1.0, "b": None}, {"a": 1.0, "b": 0.0})]) is None


def test_the_trainer_takes_the_noise_that_is_set_else_measured_else_assumed(store: Store, tmp_path: Path) -> None:
    ruler = {"kind": "ruler", "base_url": "http://127.0.0.1:1/v1", "model": "big"}
    function = {"kind": "function", "function": "a:b"}

    def noise(judge: dict[str, Any], **more: Any) -> float:
        settings = TrainerSettings(
            store="s", model="agent", base_model="b", vllm=("http://127.0.0.1:1",), checkpoints=tmp_path,
            judge=judge, **more,
        )  # fmt: skip
        return judge_noise(settings, store, "v2")

    assert noise(function) == 0.0
    assert noise(ruler) == ASSUMED_NOISE
    both = [{"name": "a", "judge": ruler, "weight": 1.0}, {"name": "b", "judge": function, "weight": 0.1}]
    assert noise({"kind": "composite", "parts": both}) == ASSUMED_NOISE
    store.observations.add("agent", "judge_noise", "v1", {"noise": 0.3})  # an earlier judge's
    assert noise(ruler) == ASSUMED_NOISE
    store.observations.add("agent", "judge_noise", "v2", {"noise": 0.04})
    assert (noise(ruler), noise(function)) == (0.04, 0.04)
    assert noise(ruler, judge_noise=0.0) == 0.0
