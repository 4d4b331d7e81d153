"""The trainer's settings with the checks across fields. Unknown names are errors. Imports no torch.

Settings that are valid one by one but can never train anything are refused with the reason and the remedy. Problems
that depend on traffic (greedy responses, a judge that gives equal scores) raise an alarm instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from pydantic import model_validator

from ratchet.trainer.settings.adapter_and_memory import AUTO
from ratchet.trainer.settings.estimators import DEFAULT_ESTIMATOR
from ratchet.trainer.settings.judge_specs import (
    ByFamilySpec,
    CompositeSpec,
    FeedbackSpec,
    JudgeSpec,
    PluginSpec,
    TeacherSpec,
    gives_only_ranks,
)
from ratchet.trainer.settings.learner_settings import LearnerSettings
from ratchet.trainer.settings.trainer_fields import MAX_SCORES_PER_FAMILY, TrainerFields

_MIN_NORM = 1e-6  # a smaller gradient is lost in AdamW's epsilon of 1e-8
_MIN_RATE = 1e-9  # a smaller step does not change an fp32 weight of 0.01
_MIN_CLIP = 1e-4  # the ratio of any trained token differs more from 1
_MIN_TOLERANCE = 1e-5  # nats; two engines never agree to more digits


class TrainerSettings(TrainerFields):
    """The settings of one trainer. Settings that cannot train anything are refused with the reason."""

    @model_validator(mode="after")
    def _is_trainable(self) -> Self:
        reason = check_trainable(self)
        if reason is not None:
            raise ValueError(reason)
        if self.keep_checkpoints <= self.keep_loaded_adapters:
            raise ValueError(
                f"keep_checkpoints {self.keep_checkpoints} must be more than keep_loaded_adapters "
                f"{self.keep_loaded_adapters}: vLLM reads the "
                "folder of what it has loaded"
            )
        return self


def check_trainable(settings: TrainerFields) -> str | None:
    """Return why these settings cannot train anything, with the remedy; None if they can."""
    return next((reason for check in _CHECKS if (reason := check(settings)) is not None), None)


def _min_group_size(settings: TrainerFields) -> str | None:
    if settings.min_group_size <= settings.num_generations:
        return None
    return (
        f"min_group_size {settings.min_group_size} is more than num_generations {settings.num_generations}: lower it, "
        "or no smaller group is ever compared"
    )


def _min_round(settings: TrainerFields) -> str | None:
    if settings.min_groups_per_round <= settings.groups_per_round:
        return None
    return (
        f"min_groups_per_round {settings.min_groups_per_round} is more than groups_per_round "
        f"{settings.groups_per_round}: lower it, or raise groups_per_round"
    )


def _min_baseline(settings: TrainerFields) -> str | None:
    if settings.ungrouped == "drop" or settings.min_baseline_samples <= MAX_SCORES_PER_FAMILY:
        return None
    return (
        f"min_baseline_samples {settings.min_baseline_samples} is more than the {MAX_SCORES_PER_FAMILY} scores kept "
        "per "
        "task family: no ungrouped trajectory would ever have a baseline; lower it, 16 is usual"
    )


def _relative_judge_of_ungrouped(settings: TrainerFields) -> str | None:
    if settings.ungrouped == "drop" or not gives_only_ranks(settings.judge):
        return None
    return (
        f"ungrouped: {settings.ungrouped} compares scores of different times and tasks, but the judge only ranks the "
        "members of one group; use a judge that scores each response by itself, or ungrouped: drop with "
        "resample.samples to train on single-call prompts (docs/ungrouped.md)"
    )


def _too_few_resamples(settings: TrainerFields) -> str | None:
    if not 0 < settings.resample.samples < settings.min_group_size - 1:
        return None
    return (
        f"resample.samples {settings.resample.samples} and the original are fewer than min_group_size "
        f"{settings.min_group_size}: they would never be compared; set resample.samples to "
        f"{settings.min_group_size - 1} or more"
    )


def _resampling_without_feedback(settings: TrainerFields) -> str | None:
    missing = _feedback_without_reader(settings.judge) if settings.resample.samples else None
    if missing is None:
        return None
    return (
        f"resample.samples samples responses that no user sees, and {missing}: they can never be scored; use a judge "
        "that reads the response itself, or resample.samples: 0"
    )


def _feedback_without_reader(judge: JudgeSpec) -> str | None:
    """Return what a judge waits for that no resample can get; None if it reads the response itself."""
    if isinstance(judge, CompositeSpec):
        return next(
            (missing for part in judge.parts if part.weight and (missing := _feedback_without_reader(part.judge))), None
        )
    if isinstance(judge, ByFamilySpec):
        return next((missing for one in judge.all if (missing := _feedback_without_reader(one))), None)
    if isinstance(judge, FeedbackSpec):
        return "judge feedback waits for feedback"
    if isinstance(judge, PluginSpec) and (awaited := judge.traits.waits_for):
        return f"judge {judge.name} waits for {awaited}"
    return None


def _proof_tolerance(settings: TrainerFields) -> str | None:
    if settings.proof_tolerance >= _MIN_TOLERANCE:
        return None
    return (
        f"proof_tolerance {settings.proof_tolerance:g} is smaller than the rounding of two engines: every version "
        "would "
        "be rejected; 0.01 to 0.2 is usual"
    )


def _learning_rate(settings: TrainerFields) -> str | None:
    rate = settings.learner.learning_rate
    if isinstance(rate, str) or rate >= _MIN_RATE:
        return None
    return f"learner.learning_rate {rate:g} is too small to change an fp32 weight; use auto, or 1e-6 to 1e-4"


def _target_kl(settings: TrainerFields) -> str | None:
    learner = settings.learner
    if learner.target_kl is None or (learner.learning_rate == AUTO and learner.loss_type != "sft"):
        return None
    return (
        f"learner.target_kl has no effect with learning_rate {learner.learning_rate} and loss {learner.loss_type}: it "
        "controls learning_rate auto, and sft has a fixed rate; leave it out, or set learning_rate: auto"
    )


def _max_grad_norm(settings: TrainerFields) -> str | None:
    if not 0 < settings.learner.max_grad_norm < _MIN_NORM:
        return None
    return (
        f"learner.max_grad_norm {settings.learner.max_grad_norm:g} scales every gradient below AdamW's epsilon; "
        "1.0 is usual, 0 sets no limit"
    )


def _clip_range(settings: TrainerFields) -> str | None:
    learner = settings.learner
    width = max(learner.clip)
    by_token = learner.objective.shape == "clip" and learner.objective.ratio == "token"
    if learner.steps_per_round == 1 or not by_token or width >= _MIN_CLIP:
        return None
    return (
        f"learner.epsilon and epsilon_high of at most {width:g} clip every token after the first of "
        f"{learner.steps_per_round} steps; 0.2 and 0.28 are usual"
    )


def _pairs_of_ungrouped(settings: TrainerFields) -> str | None:
    preference = settings.learner.objective.preference
    if preference is None or not preference.of_groups or settings.ungrouped == "drop":
        return None
    return (
        f"learner.loss_type {settings.learner.loss_type} compares responses of a group, and ungrouped: "
        f"{settings.ungrouped} has only one response to a prompt: use loss_type apo_zero_unpaired, or ungrouped: drop "
        "with resample.samples to train on single-call prompts"
    )


def _turn_weight_of_preferences(settings: TrainerFields) -> str | None:
    if not settings.turn_weight or not settings.learner.objective.preference:
        return None
    return (
        f"turn_weight has no effect with loss {settings.learner.loss_type}, which compares whole answers: set it to 0"
    )


def _setting_without_effect(settings: TrainerFields) -> str | None:
    """Return a setting that was changed although the loss ignores it."""
    learner, objective = settings.learner, settings.learner.objective
    used_by_loss = {
        "epsilon": objective.ratio != "none" and objective.shape == "clip",
        "epsilon_high": objective.ratio != "none",
        "top_entropy_quantile": objective.ratio != "none",
        "dr_grpo_length": objective.mean == "length",
        "preference_beta": objective.preference is not None,
    }
    defaults = LearnerSettings()
    unused = [
        name for name, used in used_by_loss.items() if not used and getattr(learner, name) != getattr(defaults, name)
    ]
    if not unused:
        return None
    return f"learner.{unused[0]} has no effect with loss {learner.loss_type}: leave it out, or use a loss that has it"


def _teacher(settings: TrainerFields) -> str | None:
    distilled, taught = settings.learner.objective.distillation, isinstance(settings.judge, TeacherSpec)
    if distilled and not taught:
        return (
            f"learner.loss_type {settings.learner.loss_type} learns from a teacher's logprobs, and the judge is none: "
            "set trainer.judge to {kind: teacher, model: NAME}, a name of model_list, or choose another loss_type"
        )
    if taught and not distilled:
        return (
            f"the judge is a teacher, which says nothing that loss_type {settings.learner.loss_type} learns from: set "
            "learner.loss_type to distillation, or choose another judge"
        )
    return None


def _without_effect_on_distillation(settings: TrainerFields) -> str | None:
    if not settings.learner.objective.distillation:
        return None
    release = settings.release
    if release.held_out_share and release.workflow is None:
        return (
            "release.held_out_share compares answers that have no token ids, which a teacher cannot score: set "
            "release.workflow and release.tasks, or leave it out"
        )
    compared = {
        "ungrouped": settings.ungrouped != "drop",
        "resample.samples": settings.resample.samples > 0,
        "turn_weight": settings.turn_weight > 0,
        "advantage_estimator": settings.advantage_estimator != DEFAULT_ESTIMATOR,
        "scale_advantages_by_family": settings.scale_advantages_by_family,
    }
    name = next((name for name, is_set in compared.items() if is_set), None)
    return name and (
        f"{name} has no effect with loss_type {settings.learner.loss_type}: each trajectory is trained by itself, and "
        "no scores are compared; leave it out"
    )


_CHECKS: tuple[Callable[[TrainerFields], str | None], ...] = (
    _min_group_size,
    _min_round,
    _min_baseline,
    _relative_judge_of_ungrouped,
    _too_few_resamples,
    _resampling_without_feedback,
    _proof_tolerance,
    _learning_rate,
    _target_kl,
    _max_grad_norm,
    _clip_range,
    _pairs_of_ungrouped,
    _turn_weight_of_preferences,
    _setting_without_effect,
    _teacher,
    _without_effect_on_distillation,
)
