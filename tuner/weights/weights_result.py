"""The result of a weight tuning: gain, cost, learning curve and gains by family, in the form of every method."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ratchet.store.operation_records import Rollout, Tuning
from ratchet.store.reasons import describe_untrained, drop_meaning
from ratchet.store.states import RoundState, TrajectoryState
from ratchet.store.store import Store
from ratchet.trainer.settings.trainer_settings import TrainerSettings
from ratchet.trainer.statistics import Compared, ComparisonVerdict
from ratchet.trainer.tasks import TEST
from ratchet.tuner.reports.tuning_result import TuningResult, task_set
from ratchet.tuner.rollouts.prices import Prices, RolloutCost
from ratchet.tuner.rollouts.runner import final_rollouts
from ratchet.tuner.selection.choice import commonest, rollout_cost
from ratchet.tuner.weights.weight_tuning import WeightsTuning, rewards
from ratchet.tuner.weights.weights_plan import LIVE, plan_of

_MAX_ROUNDS = 1000


def result_of(
    store: Store, tuning: Tuning, run: WeightsTuning, trainer: TrainerSettings, judge: str, prices: Prices
) -> TuningResult:
    """Return the result of a finished run."""
    plan, state = plan_of(tuning), run.state
    final = store.policies.live()[tuning.alias].version
    tested = [one for one in state.evaluations if one.split == TEST]
    is_measured = final in {one.version for one in tested}
    gain = run.compared(final, state.baseline) if is_measured and final != state.baseline else None
    store.rollouts.count_tokens([one.id for one in store.rollouts.of_tuning(tuning.id) if not one.planned])
    made = store.rollouts.of_tuning(tuning.id)
    rollouts = final_rollouts(made)
    ours = [] if state.warm_start is None else ["SFT"]
    if state.rounds:
        ours.append(f"{trainer.advantage_estimator} with {trainer.learner.loss_type}, {state.rounds} rounds")
    notes = state.notes if is_measured else (*state.notes, f"{tuning.alias}@{final} was not evaluated")
    trained = _trained(store, tuning) if state.rounds else None
    return TuningResult(
        method="weights",
        technique=" -> ".join(ours) or "evaluation only",
        alias=tuning.alias,
        task_set=task_set(", ".join(plan.families), "test", [task.id for task in run.tests]),
        judge=judge,
        workflow=plan.workflows,
        attempts=plan.eval_attempts,
        baseline=f"{tuning.alias}@{state.baseline}",
        best=f"{tuning.alias}@{final}" if gain is not None and gain.verdict is ComparisonVerdict.BETTER else None,
        gain=gain,
        spent=sum((rollout_cost(one, prices) for one in made if one.counts or one.prompt_tokens), RolloutCost()),
        wall_seconds=state.wall_seconds,
        promoted=f"{tuning.alias}@{final}" if final != state.baseline else None,
        notes=(*notes, *_failures(rollouts), *(_training_notes(trained) if trained is not None else ())),
        details={
            "curve": [msgspec.to_builtins(one) for one in state.validated],
            "test": [msgspec.to_builtins(one) for one in tested],
            "training": [
                {"round": number, "family": family, "reward": mean, "judged": count}
                for (number, family), (mean, count) in rewards(
                    store, (one for one in rollouts if one.candidate == LIVE)
                ).items()
            ],
            "families": _families(run, final, state.baseline) if gain is not None else {},
            "warm_start": state.warm_start,
            "rounds": state.rounds,
            "trained": trained,
        },
    )


def _trained(store: Store, tuning: Tuning) -> dict[str, Any]:
    """Return what the trainer made of the rounds: its own rounds since the run began, and the rollouts' outcomes."""
    made = [one for one in store.rounds.page(tuning.alias, _MAX_ROUNDS) if one.started_at >= tuning.started_at]
    committed = [one for one in made if one.state is RoundState.COMMITTED and "warm_start" not in one.metrics]
    abandoned = [one for one in made if one.state is RoundState.ABANDONED]
    untrained: Counter[str] = Counter()
    for one in committed:
        untrained.update(one.metrics.get("untrained_tokens") or {})
    return {
        "committed": len(committed),
        "abandoned": len(abandoned),
        "abandoned_because": abandoned[0].reason if abandoned else None,
        "rollouts": store.rollouts.training_outcomes(tuning.id, LIVE),
        "untrained_tokens": dict(untrained),
    }


def _training_notes(trained: Mapping[str, Any]) -> Iterator[str]:
    """Yield how many rounds and rollouts were trained and why the others were not, with the commonest remedy."""
    left = Counter(trained["rollouts"])
    total, used = left.total(), left.pop(TrajectoryState.TRAINED, 0)
    counts = ", ".join(f"{count} {reason}" for reason, count in left.most_common())
    note = f"rounds of the trainer: {trained['committed']} committed, {trained['abandoned']} abandoned"
    note += f"; {used} of {total} training rollouts were trained" + (f", the others not: {counts}" if counts else "")
    remedy = drop_meaning(left.most_common(1)[0][0]) if left else None
    yield f"{note} ({remedy})" if remedy else note
    if trained["abandoned_because"]:
        yield f"the last abandoned round: {trained['abandoned_because']}"
    if trained["untrained_tokens"]:
        yield f"tokens of committed rounds, {describe_untrained(trained['untrained_tokens'])}"


def _failures(rollouts: Sequence[Rollout]) -> Iterator[str]:
    """Yield the commonest failures of the agent and of the judge."""
    if failure := commonest(one.failure for one in rollouts):
        failed = sum(one.failure is not None for one in rollouts)
        yield f"{failed} of {len(rollouts)} rollouts failed, most often with {failure}"
    if failure := commonest(one.judge_failure for one in rollouts):
        yield f"the judge failed, most often with {failure}"


def _families(run: WeightsTuning, final: int, baseline: int) -> dict[str, Any]:
    """Return the gain on the test tasks of each family."""
    names = dict.fromkeys(task.id.rpartition("/")[0] for task in run.tests)
    gains: dict[str, Compared] = {name: run.compared(final, baseline, name) for name in names}
    return {name: msgspec.to_builtins(gain) for name, gain in gains.items()}
