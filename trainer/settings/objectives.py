"""Objectives: the losses by their standard names, as data.

A is the advantage of a token, r the ratio of its probability under the policy to that at the start of the round. Means
are over the rows of one optimizer step that are not masked:

    grpo         min(r A, clip(r) A), mean over a row's tokens, then over rows: Shao et al. 2024, "DeepSeekMath",
                 equation 3 (arXiv:2402.03300). Clip 0.2 on both sides
    dr_grpo      the same, but a row's sum is divided by a constant instead of its length, which would favour
                 long failures: Liu et al. 2025, "Understanding R1-Zero-like training" (arXiv:2503.20783)
    dapo         the same terms, mean over all tokens; clipped higher than lower, 0.28 and 0.2: Yu et al. 2025, "DAPO",
                 equation 8 (arXiv:2503.14476). With both sides 0.2 it is the PPO clip of Schulman et al. 2017
                 (arXiv:1707.06347)
    cispo        min(r, 1 + high) as a constant, times A log p, mean over all tokens: no token loses its gradient:
                 MiniMax 2025, "MiniMax-M1", equation 4 (arXiv:2506.13585). `epsilon_high` is the largest weight itself
    gspo         s = the geometric mean of r over the row, min(s A, clip(s) A), mean over rows: Zheng et al. 2025,
                 "Group sequence policy optimization", equation 5 (arXiv:2507.18071). Clip 3e-4 and 4e-4
    reinforce++  the terms of dapo with clip 0.2 on both sides, and advantages that are first whitened over the round's
                 tokens: Hu et al. 2025, "REINFORCE++", equation 8 (arXiv:2501.03262)
    distillation the terms of dapo with clip 0.2 on both sides and A = log p_teacher - log p of the sampled token, p at
                 the start of the round: reverse KL from a teacher, with discount 0 (a token is not credited with later
                 ones). Agarwal et al. 2024, "On-policy distillation of language models", with lambda 1 and reverse KL
                 (arXiv:2306.13649); as a policy gradient: Gu et al. 2024, "MiniLLM", section 2.2 (arXiv:2306.08543).
                 A is limited to 10 nats on both sides, so that one token does not outweigh a step
    sft          - A log p, mean over all tokens, without a ratio: the loss of a warm start

Differences from the papers: in `grpo` and `gspo` a row is what the papers call an output, so a trajectory of several
segments counts as several, unless `learner.mean_over` is trajectories; KL is a penalty in the loss for all of them,
never part of the reward. No torch, no computation.

Other packages register an Objective under a name of their own in the entry-point group `ratchet.objectives`
(docs/plugins.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from ratchet.trainer.errors import PluginError, SettingError
from ratchet.trainer.user_code import (
    ADVANTAGE_ESTIMATORS,
    OBJECTIVE_PLUGINS,
    OWN_PLUGINS,
    load_plugin,
    plugin_names,
)

Mean = Literal["tokens", "rows", "trajectories", "length"]
MEANS = ("tokens", "rows", "trajectories")  # those that `learner.mean_over` offers


@dataclass(frozen=True, slots=True)
class StepTokens:
    """What an objective's `token_advantages` gets: torch tensors (N, T) of N rows, without gradients.

    advantages  of each token, times its importance weight; 0 where nothing is trained
    logprobs    of the policy at the start of the round; entropy of its distributions
    sampling_logprobs  that vLLM recorded
    trained     whether the token carries loss
    """

    advantages: Any
    logprobs: Any
    entropy: Any
    sampling_logprobs: Any
    trained: Any


@dataclass(frozen=True, slots=True)
class Preference:
    """How a loss compares whole trajectories under the policy and the base model; rows are TokenRows.

    of_groups      whether it compares the members of a group with each other, so that a trajectory alone has no signal
    units          from the rows of a round to those that must share a step, without those in which nothing is preferred
    weighted_rows  from the rows of a step, of each row log p minus the base model's log p, summed over its answers, and
                   `learner.preference_beta`, to the rows with the weights of their tokens' log p as advantages, and the
                   mean loss
    """

    of_groups: bool
    units: Callable[[Sequence[Any]], list[list[Any]]]
    weighted_rows: Callable[[Sequence[Any], Sequence[float], float], tuple[list[Any], float]]


@dataclass(frozen=True, slots=True)
class Objective:
    """The parts of a loss.

    shape    clip: the minimum of ratio and clipped ratio times advantage; weight: a constant ratio times log p
    ratio    token: per token; sequence: the row's geometric mean; none: 1
    mean     over the tokens of a step, over its rows' means, over its trajectories' means, or over its rows' sums
             divided by a constant length
    whitened whether advantages are first given mean 0 and variance 1 over the round's tokens
    distillation  whether a row's advantages are the teacher's logprobs less vLLM's: they become the teacher's logprobs
             less those of the policy at the start of the round
    preference  comparison of whole trajectories: each step computes its weights from the policy that it starts from
    token_advantages  replaces the tokens' advantages, from StepTokens to a tensor (N, T); None: as they are
    """

    shape: Literal["clip", "weight"]
    ratio: Literal["token", "sequence", "none"]
    mean: Mean
    epsilon_low: float
    epsilon_high: float
    whitened: bool = False
    preference: Preference | None = None
    distillation: bool = False
    token_advantages: Callable[[StepTokens], Any] | None = None


OBJECTIVES: Mapping[str, Objective] = {
    "dapo": Objective("clip", "token", "tokens", 0.2, 0.28),
    "grpo": Objective("clip", "token", "rows", 0.2, 0.2),
    "dr_grpo": Objective("clip", "token", "length", 0.2, 0.2),
    "cispo": Objective("weight", "token", "tokens", 0.2, 5.0),
    "gspo": Objective("clip", "sequence", "rows", 3e-4, 4e-4),
    "reinforce++": Objective("clip", "token", "tokens", 0.2, 0.2, whitened=True),
    "distillation": Objective("clip", "token", "tokens", 0.2, 0.2, distillation=True),
    "sft": Objective("weight", "none", "tokens", 0.2, 1.0),
}


def find_objective(name: str) -> Objective:
    """Return the objective of a loss: a built-in one, or a plug-in's. Raises SettingError with the names there are."""
    return OBJECTIVES[name] if name in OBJECTIVES else _plugin(name)


@cache
def _plugin(name: str) -> Objective:
    plugins = plugin_names(OBJECTIVE_PLUGINS)
    if name not in plugins and name not in OWN_PLUGINS[OBJECTIVE_PLUGINS]:
        installed = f", or a plug-in: {', '.join(plugins)}" if plugins else ""
        raise SettingError(f"learner.loss_type is {name!r}; it must be one of {', '.join(OBJECTIVES)}{installed}")
    try:
        found = load_plugin(OBJECTIVE_PLUGINS, name)
    except PluginError as error:
        raise SettingError(f"learner.loss_type is {name!r}: {error}") from error
    if not isinstance(found, Objective):
        raise SettingError(
            f"learner.loss_type is {name!r}, whose plug-in is a {type(found).__name__}: it must be an Objective of "
            "ratchet.trainer.settings.objectives (docs/plugins.md)"
        )
    return found


# Advantage estimators by name; the built-in formulas are in `ratchet.trainer.advantages`.
BUILT_IN = ("grpo", "dr_grpo", "rloo", "reinforce++")
DEFAULT_ESTIMATOR = "dr_grpo"  # of trainer.advantage_estimator


@dataclass(frozen=True, slots=True)
class AdvantageFunctions:
    """An advantage estimator of another package.

    `group` maps the G scores of a group, of which some differ, to G advantages. Cohorts and ungrouped trajectories are
    estimated as by dr_grpo: relative to the mean of the other members, and of the family's earlier scores.
    """

    group: Callable[[Sequence[float]], Sequence[float]]


def why_unknown(name: str) -> str | None:
    """Return what is wrong with an estimator's name; None if there is one. Imports no plug-in."""
    plugins = plugin_names(ADVANTAGE_ESTIMATORS) if name not in BUILT_IN else []
    if name in BUILT_IN or name in plugins:
        return None
    installed = f", or a plug-in: {', '.join(plugins)}" if plugins else ""
    return f"{name!r} is no advantage estimator; use one of {', '.join(BUILT_IN)}{installed}"


def find_estimator(name: str) -> AdvantageFunctions | None:
    """Return a plug-in's estimator; None for a built-in one. Raises PluginError."""
    return None if name in BUILT_IN else _plugin_estimator(name)


@cache
def _plugin_estimator(name: str) -> AdvantageFunctions:
    found = load_plugin(ADVANTAGE_ESTIMATORS, name)
    if not isinstance(found, AdvantageFunctions):
        raise PluginError(
            f"advantage estimator {name!r} is a {type(found).__name__}: it must be AdvantageFunctions of "
            "ratchet.trainer.settings.objectives (docs/plugins.md)"
        )
    return found
