"""Settings that are in range and yet could never teach anything: the reason and the remedy.

Pure. Each check is a sentence about these settings alone, true whatever the traffic is. What only traffic can show (a
batch of greedy answers, a judge that happens to say the same of everyone) is counted and told by alarms instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ratchet.trainer.settings.judge_specs import (
    BehaviorSpec,
    CompositeSpec,
    FeedbackSpec,
    JudgeSpec,
    NextStateSpec,
    gives_only_ranks,
)
from ratchet.trainer.settings.learner_settings import AUTO, LearnerSettings
from ratchet.trainer.settings.trainer_fields import MAX_SCORES_PER_FAMILY, TrainerFields

# What a pattern must tell apart: if it matches all of these, it matches everything that is worth scoring.
_UNLIKE = ("", "x", "7", "no idea", "The answer is 42.", "{}", "a\nb", "ü" * 50, "<answer>Oslo</answer>")
_LEAST_NORM = 1e-6  # a gradient scaled below this drowns in AdamW's epsilon of 1e-8
_LEAST_RATE = 1e-9  # an fp32 weight of 0.01 does not change by less
_LEAST_CLIP = 1e-4  # the ratio of a token that learnt anything is farther from 1
_LEAST_TOLERANCE = 1e-5  # nats; two engines never compute equal logprobs to more digits


def check_trainable(settings: TrainerFields) -> str | None:
    """Return why these settings cannot teach anything, with the remedy; None where they can."""
    return next((reason for check in _CHECKS if (reason := check(settings)) is not None), None)


def constant_by_construction(judge: JudgeSpec) -> str | None:
    """Return why a judge's specification gives every trajectory the same score; None where it need not."""
    if isinstance(judge, CompositeSpec):
        said = [constant_by_construction(part.judge) for part in judge.parts if part.weight]
        return f"all parts with a weight are constant: {said[0]}" if said and all(said) else None
    if not isinstance(judge, BehaviorSpec):
        return None
    if judge.rule == "short" and judge.limit == 1:
        return "rule short with limit 1 scores 0 whatever was sampled; set limit to the longest good length in tokens"
    if judge.rule == "pattern" and all(re.fullmatch(judge.pattern, text, re.DOTALL) for text in _UNLIKE):
        return f"pattern {judge.pattern!r} matches every answer; name what only a good answer has"
    return None


def _judge(settings: TrainerFields) -> str | None:
    reason = constant_by_construction(settings.judge)
    return reason and f"the judge gives every trajectory the same score: {reason}"


def _least_group(settings: TrainerFields) -> str | None:
    if settings.min_group_size <= settings.num_generations:
        return None
    return (
        f"min_group_size {settings.min_group_size} is more than num_generations {settings.num_generations}: lower "
        "it, or no smaller "
        "group is ever compared"
    )


def _least_round(settings: TrainerFields) -> str | None:
    if settings.min_groups_per_round <= settings.groups_per_round:
        return None
    return (
        f"min_groups_per_round {settings.min_groups_per_round} is more than groups_per_round "
        f"{settings.groups_per_round}: "
        "lower it, or raise groups_per_round"
    )


def _single_least(settings: TrainerFields) -> str | None:
    if settings.ungrouped == "drop" or settings.min_baseline_samples <= MAX_SCORES_PER_FAMILY:
        return None
    return (
        f"min_baseline_samples {settings.min_baseline_samples} is more than the {MAX_SCORES_PER_FAMILY} scores of "
        "a task family that are "
        "remembered: no single would ever have a baseline; lower it, 16 is usual"
    )


def _rank_of_one(settings: TrainerFields) -> str | None:
    if settings.ungrouped == "drop" or not gives_only_ranks(settings.judge):
        return None
    return (
        f"ungrouped: {settings.ungrouped} compares scores of different times and tasks, and the judge only ranks the "
        "members of one group: a single is best and worst of its own; take a judge that scores each answer by "
        "itself, or ungrouped: drop, with resample.samples where single-call prompts shall learn (docs/ungrouped.md)"
    )


def _too_few_resamples(settings: TrainerFields) -> str | None:
    if not 0 < settings.resample.samples < settings.min_group_size - 1:
        return None
    return (
        f"resample.samples {settings.resample.samples} and the original are fewer than min_group_size "
        f"{settings.min_group_size}: they would never be compared; take {settings.min_group_size - 1} "
        "resample.samples or more"
    )


def _resampling_without_feedback(settings: TrainerFields) -> str | None:
    what = _feedback_without_reader(settings.judge) if settings.resample.samples else None
    if what is None:
        return None
    return (
        f"resample.samples asks for answers that nobody sees, and {what}: they could never be scored; take a "
        "judge that "
        "reads the answer itself, or resample.samples: 0"
    )


def _feedback_without_reader(judge: JudgeSpec) -> str | None:
    """Return what a judge waits for that nobody says of an answer which nobody saw; None where it reads answers."""
    if isinstance(judge, CompositeSpec):
        return next(
            (what for part in judge.parts if part.weight and (what := _feedback_without_reader(part.judge))), None
        )
    if isinstance(judge, FeedbackSpec):
        return "judge feedback waits for the word of people"
    return "judge next_state waits for the next message" if isinstance(judge, NextStateSpec) else None


def _proof(settings: TrainerFields) -> str | None:
    if settings.proof_tolerance >= _LEAST_TOLERANCE:
        return None
    return (
        f"proof_tolerance {settings.proof_tolerance:g} is finer than the rounding of two engines: every version would "
        "be rejected; 0.01 to 0.2 is usual"
    )


def _rate(settings: TrainerFields) -> str | None:
    rate = settings.learner.learning_rate
    if isinstance(rate, str) or rate >= _LEAST_RATE:
        return None
    return (
        f"learner.learning_rate {rate:g} is below what an fp32 weight can change by; auto finds one, and 1e-6 to 1e-4 "
        "is usual"
    )


def _target(settings: TrainerFields) -> str | None:
    learner = settings.learner
    if learner.target_kl is None or (learner.learning_rate == AUTO and learner.loss_type != "sft"):
        return None
    return (
        f"learner.target_kl has no effect with learning_rate {learner.learning_rate} and loss {learner.loss_type}: it "
        "steers learning_rate auto, and sft imitates at a fixed rate; leave it out, or set learning_rate: auto"
    )


def _norm(settings: TrainerFields) -> str | None:
    if not 0 < settings.learner.max_grad_norm < _LEAST_NORM:
        return None
    return (
        f"learner.max_grad_norm {settings.learner.max_grad_norm:g} scales every gradient below AdamW's epsilon; "
        "1.0 is usual, 0 sets no limit"
    )


def _clip(settings: TrainerFields) -> str | None:
    learner = settings.learner
    width = max(learner.clip)
    by_token = learner.objective.shape == "clip" and learner.objective.ratio == "token"
    if learner.steps_per_round == 1 or not by_token or width >= _LEAST_CLIP:
        return None
    return (
        f"learner.epsilon_low and epsilon_high of at most {width:g} silence every token after the first of "
        f"{learner.steps_per_round} steps; 0.2 and 0.28 are usual"
    )


def _no_pairs(settings: TrainerFields) -> str | None:
    if settings.learner.loss_type != "dpo" or settings.ungrouped == "drop":
        return None
    return (
        f"learner.loss_type dpo compares the best and the worst of a group, and ungrouped: {settings.ungrouped} "
        "has no two "
        "answers to one prompt: take loss apo_zero_unpaired, or ungrouped: drop, with resample.samples where "
        "single-call "
        "prompts shall learn"
    )


def _turns_of_whole_answers(settings: TrainerFields) -> str | None:
    if not settings.turn_weight or not settings.learner.objective.preference:
        return None
    return (
        f"turn_weight has no effect with loss {settings.learner.loss_type}, which compares whole answers: set it to 0"
    )


def _without_effect(settings: TrainerFields) -> str | None:
    """Name a setting that the loss never looks at: whoever set it believes in it."""
    learner, objective = settings.learner, settings.learner.objective
    looked_at = {
        "epsilon": objective.ratio != "none" and objective.shape == "clip",
        "epsilon_high": objective.ratio != "none",
        "top_entropy_quantile": objective.ratio != "none",
        "dr_grpo_length": objective.mean == "length",
        "preference_beta": objective.preference,
    }
    usual = LearnerSettings()
    idle = [name for name, used in looked_at.items() if not used and getattr(learner, name) != getattr(usual, name)]
    if not idle:
        return None
    return f"learner.{idle[0]} has no effect with loss {learner.loss_type}: leave it out, or take a loss that has it"


_CHECKS: tuple[Callable[[TrainerFields], str | None], ...] = (
    _judge, _least_group, _least_round, _single_least, _rank_of_one, _too_few_resamples,
    _resampling_without_feedback, _proof, _rate,
    _target, _norm, _clip, _no_pairs, _turns_of_whole_answers, _without_effect,
)  # fmt: skip
