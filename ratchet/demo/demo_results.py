"""The demo's figures: counts and means of the agent's results and of rows in the store.

`read_results` fails if a row is missing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any

from ratchet.demo.behaviour import Behaviour, behaviour_of
from ratchet.demo.email_search.hard_tasks import NEW_NAMES, TWO_HOPS
from ratchet.demo.reviews.tasks import LABELS
from ratchet.store.records import Call, Round
from ratchet.store.states import CallState, PolicyState, RoundState
from ratchet.store.store import Store

_NOT_PROVEN = (PolicyState.CANDIDATE, PolicyState.UNPROVEN, PolicyState.REJECTED)


@dataclass(frozen=True, slots=True)
class HeldOutEvaluation:
    """Tasks under one version: success at temperature 1 and greedily, each with its 95% interval, and the behaviour.

    `greedy_success` is of one attempt per task; `behaviour` and the means are of the attempts at temperature 1.
    """

    model: str
    tasks: int
    rollouts: int
    success: float
    low: float
    high: float
    greedy_success: float
    greedy_low: float
    greedy_high: float
    turns: float
    tool_failures: float
    completion_tokens: float
    api_errors: int
    behaviour: Behaviour
    greedy_behaviour: Behaviour
    success_by_kind: Mapping[str, float]  # at temperature 1, of the hard set's kinds or of the labels


@dataclass(frozen=True, slots=True)
class VersionRow:
    """Results of the agent's training traffic under one policy version; means are per rollout."""

    version: str
    rollouts: int
    success: float
    tool_failures: float
    turns: float
    prompt_tokens: float
    completion_tokens: float
    share_ran_out: float
    behaviour: Behaviour


@dataclass(frozen=True, slots=True)
class RoundRow:
    """One committed training round; logprob differences and `kl` (k3) in nats per token."""

    version: int
    state: str
    groups: int
    trajectories: int
    reward: float
    tokens_trained: int
    loss: float
    mismatch_mean: float
    mismatch_max: float
    proof: float
    proof_slope: float | None  # of the served on the trained change, the smallest of the replicas
    proof_correlation: float | None
    kl: float
    kl_floor: float | None  # what rounding alone reads
    rows_rejected: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DemoResults:
    """Everything that the demo shows and writes."""

    seed: int
    base_model: str
    dtype: str  # in which vLLM serves
    release_policy: str  # trainer.release.policy
    before: HeldOutEvaluation
    after: HeldOutEvaluation
    hard_before: HeldOutEvaluation | None
    hard_after: HeldOutEvaluation | None
    curve: tuple[tuple[int, float], ...]  # (rollouts so far, success over the last window of them)
    versions: tuple[VersionRow, ...]
    rounds: tuple[RoundRow, ...]
    swaps: int
    versions_proven: int
    calls: int
    failed_calls: int
    mixed_version_trajectories: int
    exact_context_share: float
    tokens_trained: int
    tokens_trained_from_engine: int
    tokens_left_out: Mapping[str, int]
    dropped: Mapping[str, int]
    mismatch_mean: float
    seconds: Mapping[str, float]

    @property
    def learned(self) -> bool:
        """Whether held-out success rose significantly: the two 95% intervals do not overlap."""
        return self.after.low > self.before.high


def wilson(successes: int, count: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the Wilson score interval of a proportion (Wilson 1927); (0, 1) without data."""
    if not count:
        return 0.0, 1.0
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share, scale = successes / count, 1 + z * z / count
    middle = (share + z * z / (2 * count)) / scale
    reach = z / scale * ((share * (1 - share) + z * z / (4 * count)) / count) ** 0.5
    return max(0.0, middle - reach), min(1.0, middle + reach)


def read_evaluation(model: str, sampled: Path, greedy: Path) -> HeldOutEvaluation:
    """Return the evaluation from the held-out results."""
    rows, greedy_rows = read_rows(sampled), read_rows(greedy)
    low, high = _interval(rows)
    greedy_low, greedy_high = _interval(greedy_rows)
    return HeldOutEvaluation(
        model=model,
        tasks=len({row["task_id"] for row in rows}),
        rollouts=len(rows),
        success=_mean(row["success"] for row in rows),
        low=low,
        high=high,
        greedy_success=_mean(row["success"] for row in greedy_rows),
        greedy_low=greedy_low,
        greedy_high=greedy_high,
        turns=_mean(row["turns"] for row in rows),
        tool_failures=_mean(sum(row["tool_failures"].values()) for row in rows),
        completion_tokens=_mean(row["completion_tokens"] for row in rows),
        api_errors=sum(row["end"] == "api_error" for row in rows),
        behaviour=behaviour_of(rows),
        greedy_behaviour=behaviour_of(greedy_rows),
        success_by_kind=_success_by_kind(rows),
    )


def _interval(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    return wilson(sum(row["success"] for row in rows), len(rows))


def _success_by_kind(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    kinds = {kind: [row for row in rows if row["task_id"].startswith(kind)] for kind in (NEW_NAMES, TWO_HOPS, *LABELS)}
    return {kind: _mean(row["success"] for row in members) for kind, members in kinds.items() if members}


@dataclass(frozen=True, slots=True)
class Evaluations:
    """The evaluations of a run: the held-out tasks, and the hard set if there is one, before and after the training."""

    before: HeldOutEvaluation
    after: HeldOutEvaluation
    hard_before: HeldOutEvaluation | None
    hard_after: HeldOutEvaluation | None


def read_results(
    store: Store,
    *,
    alias: str,
    evaluations: Evaluations,
    train: Path,
    seed: int,
    base_model: str,
    dtype: str,
    release_policy: str,
    seconds: Mapping[str, float],
) -> DemoResults:
    """Return the figures of a finished run."""
    rows = read_rows(train)
    rounds = [held for held in store.rounds.page(alias, limit=1000) if held.state is RoundState.COMMITTED][::-1]
    calls = list(all_calls(store))
    policies = store.policies.all(alias)
    trained = sum(int(held.metrics["tokens_trained"]) for held in rounds)
    left_out = _sum_counts(_left_out(held.metrics) for held in rounds)
    continued = [call for call in calls if call.parent_call and call.state is CallState.ANSWERED]
    return DemoResults(
        seed=seed,
        base_model=base_model,
        dtype=dtype,
        release_policy=release_policy,
        before=evaluations.before,
        after=evaluations.after,
        hard_before=evaluations.hard_before,
        hard_after=evaluations.hard_after,
        curve=tuple(_curve(rows)),
        versions=tuple(_version_rows(rows)),
        rounds=tuple(_round_row(store, held) for held in rounds),
        swaps=sum(p.version > 0 and p.state in (PolicyState.LIVE, PolicyState.RETIRED) for p in policies),
        versions_proven=sum(p.version > 0 and p.state not in _NOT_PROVEN for p in policies),
        calls=len(calls),
        failed_calls=sum(call.state is not CallState.ANSWERED or call.status != 200 for call in calls),
        mixed_version_trajectories=_mixed(calls),
        exact_context_share=_mean(call.context == "exact" for call in continued),
        tokens_trained=trained,
        tokens_trained_from_engine=_engine_tokens(store, calls, rounds) - sum(left_out.values()),
        tokens_left_out=left_out,
        dropped=store.trajectories.drop_counts(),
        mismatch_mean=_weighted(rounds, "logprob_abs_diff_mean", "tokens_compared"),
        seconds=seconds,
    )


def all_calls(store: Store) -> Iterator[Call]:
    """Yield every recorded call, newest first."""
    before = None
    while page := store.calls.page(limit=1000, before=before):
        yield from page
        before = page[-1].id


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the agent's results, one dict per rollout, in the order in which they ended."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def _engine_tokens(store: Store, calls: Sequence[Call], rounds: Sequence[Round]) -> int:
    """Return how many token ids vLLM returned for the trajectories that were trained."""
    trained = {name for held in rounds for name in store.trajectories.trained_in_round(held.id, limit=100_000)}
    return sum(len(choice.token_ids) // 4 for call in calls if call.trajectory_id in trained for choice in call.choices)


def _left_out(metrics: Mapping[str, Any]) -> dict[str, int]:
    """Return the sampled tokens of a round without loss by reason. All its rows are compared, rejected ones as well."""
    counts = dict(metrics["untrained_tokens"])
    if metrics["rows_rejected"]:
        counts["rejected"] = int(metrics["tokens_compared"]) - int(metrics["tokens_trained"])
    return counts


def _mixed(calls: Sequence[Call]) -> int:
    versions: dict[str, set[int]] = {}
    for call in calls:
        versions.setdefault(call.trajectory_id, set()).add(call.version)
    return sum(len(seen) > 1 for seen in versions.values())


def _curve(rows: Sequence[Mapping[str, Any]], window: int = 128) -> Iterator[tuple[int, float]]:
    for end in range(window, len(rows) + 1, window // 4):
        yield end, _mean(row["success"] for row in rows[end - window : end])


def _version_rows(rows: Sequence[Mapping[str, Any]]) -> Iterator[VersionRow]:
    by_version: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_version.setdefault(" ".join(row["models"]) or "no answer", []).append(row)
    for version in sorted(by_version, key=lambda name: (len(name), name)):
        members = by_version[version]
        yield VersionRow(
            version=version,
            rollouts=len(members),
            success=_mean(row["success"] for row in members),
            tool_failures=_mean(sum(row["tool_failures"].values()) for row in members),
            turns=_mean(row["turns"] for row in members),
            prompt_tokens=_mean(row["prompt_tokens"] for row in members),
            completion_tokens=_mean(row["completion_tokens"] for row in members),
            share_ran_out=_mean(row["end"] == "ran_out_of_turns" for row in members),
            behaviour=behaviour_of(members),
        )


def _round_row(store: Store, held: Round) -> RoundRow:
    policy = store.policies.get(held.alias, held.to_version or 0)
    proofs = policy.evidence.get("proof", {}).values()
    return RoundRow(
        version=policy.version,
        state=str(policy.state),
        groups=int(held.metrics["groups"]),
        trajectories=int(held.metrics["trajectories"]),
        reward=float(held.metrics["reward"]),
        tokens_trained=int(held.metrics["tokens_trained"]),
        loss=float(held.metrics["loss"]),
        mismatch_mean=float(held.metrics["logprob_abs_diff_mean"]),
        mismatch_max=float(held.metrics["logprob_abs_diff_max"]),
        proof=max((float(proof["served_vs_trainer"]) for proof in proofs), default=float("nan")),
        proof_slope=_smallest(proofs, "slope"),
        proof_correlation=_smallest(proofs, "correlation"),
        kl=float(held.metrics["approx_kl"]),
        kl_floor=held.metrics.get("approx_kl_floor"),
        rows_rejected=int(held.metrics["rows_rejected"]),
        seconds=float(held.metrics["seconds"]),
    )


def _smallest(proofs: Iterable[Mapping[str, Any]], name: str) -> float | None:
    return min((float(proof[name]) for proof in proofs if name in proof), default=None)


def _weighted(rounds: Sequence[Round], value: str, weight: str) -> float:
    total = sum(held.metrics[weight] for held in rounds)
    return sum(held.metrics[value] * held.metrics[weight] for held in rounds) / total if total else 0.0


def _sum_counts(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for one in counts:
        for name, count in one.items():
            total[name] = total.get(name, 0) + count
    return total


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return fmean(found) if found else 0.0
