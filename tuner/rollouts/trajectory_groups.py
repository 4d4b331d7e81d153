"""Groups of trajectories with rewards, as `ratchet.gather` returns them and `ratchet.train` takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from ratchet.trainer.errors import TuningError


@dataclass(frozen=True, slots=True)
class SampledCall:
    """One answer that an engine sampled, for a trajectory that Ratchet did not record.

    prompt_token_ids  the engine's ids of the whole prompt, not ids of a tokenizer that rendered it again
    token_ids         the sampled ids, with the end token
    logprobs          of the sampled tokens, under the distribution that they were drawn from (vLLM:
                      `--logprobs-mode processed_logprobs`)
    sampling          sampling parameters of the request, such as temperature
    finish_reason     as the engine gave it
    """

    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    finish_reason: str | None = "stop"


@dataclass(frozen=True, slots=True)
class ScoredTrajectory:
    """One attempt at a scenario. Its tokens are recorded under its `id`, or given as `calls`.

    reward       higher is better; None: not trained
    id           of a trajectory that `gather` recorded; "": `calls` has the tokens
    messages     the conversation, for judges and people
    response     what the workflow returned
    metrics      name -> number
    failure      the exception of the workflow or the judge
    explanation  the judge's
    calls        the sampled answers of an imported trajectory, in order
    version      the agent's version that sampled an imported one, such as 3; None: the live one
    """

    reward: float | None = None
    id: str = ""
    messages: Sequence[Mapping[str, Any]] = ()
    response: Any = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    failure: str | None = None
    explanation: str = ""
    calls: Sequence[SampledCall] = ()
    version: int | None = None


@dataclass(frozen=True, slots=True)
class TrajectoryGroup:
    """Attempts at one scenario, whose rewards are compared with each other.

    trajectories  failed ones included
    scenario      the row; judges get it as `task`
    run           the id of the run that gathered them
    """

    trajectories: Sequence[ScoredTrajectory]
    scenario: Mapping[str, Any] = field(default_factory=dict)
    run: str | None = None

    @property
    def rewards(self) -> tuple[float | None, ...]:
        """The reward of each trajectory."""
        return tuple(one.reward for one in self.trajectories)

    def with_rewards(self, rewards: Sequence[float | None]) -> Self:
        """Return the group with other rewards, one for each trajectory. Raises ValueError."""
        if len(rewards) != len(self.trajectories):
            raise ValueError(
                f"{len(rewards)} rewards are given for the {len(self.trajectories)} trajectories of this group: give "
                "one for each, None for those that are not trained"
            )
        given = [replace(one, reward=reward) for one, reward in zip(self.trajectories, rewards, strict=True)]
        return replace(self, trajectories=tuple(given))


def check_groups(groups: Sequence[object]) -> None:
    """Raise TuningError, which names the place, unless these are groups of trajectories."""
    if not groups:
        raise TuningError("groups is empty: give what `ratchet.gather` returned, or your own TrajectoryGroup")
    for place, group in enumerate(groups):
        if not isinstance(group, TrajectoryGroup):
            raise TuningError(f"groups[{place}] is {group!r:.100}: give a ratchet.TrajectoryGroup")
        for number, one in enumerate(group.trajectories):
            if not isinstance(one, ScoredTrajectory):
                where = f"groups[{place}].trajectories[{number}]"
                raise TuningError(f"{where} is {one!r:.100}: give a ratchet.ScoredTrajectory")
