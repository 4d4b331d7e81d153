"""The demo's figures, as one dict: counts and means of the agent's results and of rows in the store.

They become tables for people, `result.json` for programs and a learning curve as PNG. A missing row is an error.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from ratchet.demo.email_search.tasks import NEW_NAMES, TWO_HOPS
from ratchet.demo.reviews.tasks import LABELS
from ratchet.output.files import pyplot
from ratchet.store.records import Call, Round
from ratchet.store.states import CallState, PolicyState, RoundState
from ratchet.store.statistics import wilson
from ratchet.store.store import Store

RESULT = "result.json"
CURVE = "learning_curve.png"
Row = Mapping[str, Any]
_NOT_PROVEN = (PolicyState.CANDIDATE, PolicyState.UNPROVEN, PolicyState.REJECTED)
_WIDTH = 132  # columns of the tables without a terminal
_WINDOW = 128  # rollouts of a point of the curve


def read_results(store: Store, alias: str, folder: Path, about: Row, seconds: Mapping[str, float]) -> dict[str, Any]:
    """Return the figures of a finished run: `about` it, and those of its results in `folder` and of the store."""
    files = {name: folder / f"{name}_sampled.jsonl" for name in ("before", "after", "hard_before", "hard_after")}
    found = {name: read_evaluation(folder, name) if path.exists() else None for name, path in files.items()}
    before, after, train = found["before"] or {}, found["after"] or {}, read_rows(folder / "train.jsonl")
    return {
        "held_out_tasks": after["tasks"],
        "held_out_success_before": before["success"],
        "held_out_success_after": after["success"],
        "held_out_greedy_before": before["greedy_success"],
        "held_out_greedy_after": after["greedy_success"],
        "hard_success_before": found["hard_before"] and found["hard_before"]["success"],
        "hard_success_after": found["hard_after"] and found["hard_after"]["success"],
        "learned": after["low"] > before["high"],  # the two 95% intervals do not overlap
        "seconds_total": round(sum(seconds.values()), 2),
        "seconds_by_stage": {name: round(value, 2) for name, value in seconds.items()},
        **about,
        **found,
        "curve": [
            (end, _mean(row["success"] for row in train[end - _WINDOW : end]))
            for end in range(_WINDOW, len(train) + 1, _WINDOW // 4)
        ],
        "versions": list(_version_rows(train)),
        **_figures_of_store(store, alias),
    }


def _figures_of_store(store: Store, alias: str) -> dict[str, Any]:
    calls, policies = list(_all_calls(store)), store.policies.all(alias)
    rounds = [held for held in store.rounds.page(alias, limit=1000) if held.state is RoundState.COMMITTED][::-1]
    left_out: Counter[str] = Counter()
    for held in rounds:
        left_out.update(_left_out(held.metrics))
    served = Counter(trajectory for trajectory, _ in {(call.trajectory_id, call.version) for call in calls})
    compared = sum(held.metrics["tokens_compared"] for held in rounds)
    differences = sum(held.metrics["logprob_abs_diff_mean"] * held.metrics["tokens_compared"] for held in rounds)
    return {
        "rounds": [_round_row(store, held) for held in rounds],
        "swaps": sum(p.version > 0 and p.state in (PolicyState.LIVE, PolicyState.RETIRED) for p in policies),
        "versions_proven": sum(p.version > 0 and p.state not in _NOT_PROVEN for p in policies),
        "calls": len(calls),
        "failed_calls": sum(call.state is not CallState.ANSWERED or call.status != 200 for call in calls),
        "mixed_version_trajectories": sum(versions > 1 for versions in served.values()),
        "exact_context_share": _mean(
            call.context == "exact" for call in calls if call.parent_call and call.state is CallState.ANSWERED
        ),
        "tokens_trained": sum(int(held.metrics["tokens_trained"]) for held in rounds),
        "tokens_trained_from_engine": _engine_tokens(store, calls, rounds) - left_out.total(),
        "tokens_left_out": dict(left_out),
        "dropped": dict(store.trajectories.drop_counts()),
        "mismatch_mean": differences / compared if compared else 0.0,
    }


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the agent's results, one dict per rollout, in the order in which they ended."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_evaluation(folder: Path, name: str) -> dict[str, Any]:
    """Return tasks under one version: success at temperature 1 and greedily with 95% intervals, and the behaviour.

    `greedy_success` is of one attempt per task; `behaviour` and the means are of the attempts at temperature 1.
    """
    rows, greedy_rows = (read_rows(folder / f"{name}_{how}.jsonl") for how in ("sampled", "greedy"))
    (low, high), (greedy_low, greedy_high) = (
        wilson(sum(row["success"] for row in found), len(found)) for found in (rows, greedy_rows)
    )
    kinds = {kind: [row for row in rows if row["task_id"].startswith(kind)] for kind in (NEW_NAMES, TWO_HOPS, *LABELS)}
    return {
        "model": " ".join(sorted({model for row in rows for model in row["models"]})),
        "tasks": len({row["task_id"] for row in rows}),
        "rollouts": len(rows),
        "low": low,
        "high": high,
        "greedy_success": _mean(row["success"] for row in greedy_rows),
        "greedy_low": greedy_low,
        "greedy_high": greedy_high,
        **_means(rows, "success", "turns", "completion_tokens"),
        "api_errors": sum(row["end"] == "api_error" for row in rows),
        "behaviour": behaviour_of(rows),
        "greedy_behaviour": behaviour_of(greedy_rows),
        "success_by_kind": {
            kind: _mean(row["success"] for row in members) for kind, members in kinds.items() if members
        },
    }


def behaviour_of(rows: Sequence[Row]) -> dict[str, Any]:
    """Return what the agent did.

    `tools` are the calls of each tool per rollout, `mails_read` the mails opened per rollout. `answered` is the share
    of rollouts that gave an answer, `read_before_answer` the share of those that had opened a mail before. `sequences`
    are the three commonest sequences of tools, or answers of an agent without tools, with their shares of the rollouts.
    """
    count = max(1, len(rows))
    answers = [row for row in rows if row["end"] == "answer"]
    calls = Counter(name for row in rows for name in row["tools"])
    return {
        "rollouts": len(rows),
        "tools": {name: calls[name] / count for name in sorted(calls)},
        "mails_read": sum(row["mails_read"] for row in rows) / count,
        "answered": len(answers) / count,
        "read_before_answer": _mean(row["mails_read"] > 0 for row in answers),
        "sequences": {name: times / count for name, times in Counter(map(_sequence, rows)).most_common(3)},
    }


def _sequence(row: Row) -> str:
    if not row["tools"] and row["end"] == "answer":
        return str(row["answer"])
    return " > ".join([*row["tools"], *([] if row["end"] == "answer" else [f"({row['end']})"])])


def _all_calls(store: Store) -> Iterator[Call]:
    before = None
    while page := store.calls.page(limit=1000, before=before):
        yield from page
        before = page[-1].id


def _engine_tokens(store: Store, calls: Sequence[Call], rounds: Sequence[Round]) -> int:
    """Return how many token ids vLLM returned for the trajectories that were trained."""
    trained = {name for held in rounds for name in store.trajectories.trained_in_round(held.id, limit=100_000)}
    return sum(len(choice.token_ids) // 4 for call in calls if call.trajectory_id in trained for choice in call.choices)


def _left_out(metrics: Row) -> dict[str, int]:
    """Return the sampled tokens of a round without loss by reason. All its rows are compared, rejected ones as well."""
    counts = dict(metrics["untrained_tokens"])
    if metrics["rows_rejected"]:
        counts["rejected"] = int(metrics["tokens_compared"]) - int(metrics["tokens_trained"])
    return counts


def _version_rows(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Yield the training traffic's results under each policy version; means are per rollout."""
    by_version: dict[str, list[Row]] = {}
    for row in rows:
        by_version.setdefault(" ".join(row["models"]) or "no answer", []).append(row)
    for version in sorted(by_version, key=lambda name: (len(name), name)):
        members = by_version[version]
        yield {
            "version": version,
            "rollouts": len(members),
            "share_ran_out": _mean(row["end"] == "ran_out_of_turns" for row in members),
            "behaviour": behaviour_of(members),
            **_means(members, "success", "turns", "prompt_tokens", "completion_tokens"),
        }


def _round_row(store: Store, held: Round) -> dict[str, Any]:
    """Return a committed round; logprob differences and `kl` (k3) in nats per token.

    `proof` is the largest difference of the replicas; `proof_slope` (of the served on the trained change) and
    `proof_correlation` are the smallest ones, None if unknown; `kl_floor` is what rounding alone reads.
    """
    policy, metrics = store.policies.get(held.alias, held.to_version or 0), held.metrics
    proofs = list(policy.evidence.get("proof", {}).values())
    return {
        "version": policy.version,
        "state": str(policy.state),
        "mismatch_mean": float(metrics["logprob_abs_diff_mean"]),
        "mismatch_max": float(metrics["logprob_abs_diff_max"]),
        "proof": max((float(proof["served_vs_trainer"]) for proof in proofs), default=float("nan")),
        "proof_slope": min((float(proof["slope"]) for proof in proofs if "slope" in proof), default=None),
        "proof_correlation": min(
            (float(proof["correlation"]) for proof in proofs if "correlation" in proof), default=None
        ),
        "kl": float(metrics["approx_kl"]),
        "kl_floor": metrics.get("approx_kl_floor"),
        **{name: int(metrics[name]) for name in ("groups", "trajectories", "tokens_trained", "rows_rejected")},
        **{name: float(metrics[name]) for name in ("reward", "loss", "seconds")},
    }


def _means(rows: Sequence[Row], *names: str) -> dict[str, float]:
    failures = _mean(sum(row["tool_failures"].values()) for row in rows)
    return {name: _mean(row[name] for row in rows) for name in names} | {"tool_failures": failures}


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return fmean(found) if found else 0.0


def write(figures: Row, folder: Path) -> None:
    """Write result.json and the learning curve into the demo's folder; print their paths."""
    path = folder / RESULT
    path.write_text(json.dumps(figures, indent=2) + "\n")
    draw(figures, folder / CURVE)
    print(f"figures: {path}\ncurve:   {folder / CURVE}")
    print(describe_next_steps(sys.argv[0], folder))


def describe_next_steps(program: str, folder: Path) -> str:
    """Return the commands that show more of the run. `program` is the path of this command: it may not be on PATH."""
    where = "" if folder.parent == Path(".ratchet").resolve() else f"RATCHET_STATE_DIR={folder.parent} "
    command = where + (program if Path(program).name == "ratchet" else "ratchet")
    project = f"--project {folder.name}"
    return f"more:    {command} status {project}, {command} trajectories list {project}"


def draw(figures: Row, path: Path) -> None:
    """Draw success over the agent's rollouts, with the held-out points before and after."""
    plots = pyplot()
    figure, axes = plots.subplots(figsize=(8, 4.5), dpi=120)
    ends = [end for end, _ in figures["curve"]]
    axes.plot(ends, [share for _, share in figures["curve"]], color="tab:blue", label="training tasks, last 128")
    for place, name in ((0, "before"), (ends[-1] if ends else 1, "after")):
        row = figures[name]
        reach = [
            [max(0.0, row["success"] - row["low"])],
            [max(0.0, row["high"] - row["success"])],
        ]  # -0.0...1: rounding
        label = "held-out tasks, 95% interval" if place == 0 else None
        axes.errorbar([place], [row["success"]], yerr=reach, fmt="o", color="tab:red", capsize=4, label=label)
    model = "" if figures["hard_before"] else f"{Path(figures['base_model']).name}, {figures['dtype']}, "
    title = f"The agent gets better ({model}seed {figures['seed']})"
    axes.set(xlabel="rollouts", ylabel="success", ylim=(0, 1.02), title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path)
    plots.close(figure)


def show(figures: Row) -> None:
    """Print the tables and the verdict."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH)
    for table in _tables(figures):
        console.print(table)
    for line in _summary(figures):
        console.print(line, soft_wrap=True, markup=False)


def _tables(figures: Row) -> Iterator[Any]:
    yield _table(
        "Rounds: what the trainer learnt from (rejected: rollouts; k3, mismatch and proof in nats per token)",
        (
            "version=@{version}", "state={state}", "groups={groups}", "rollouts={trajectories}", "reward={reward:.3f}",
            "tokens={tokens_trained}", "rejected={rows_rejected}", "loss={loss:+.4f}", "k3={kl:.5f}",
            "mismatch={mismatch_mean:.5f}", "proof={proof:.5f}", "s={seconds:.1f}",
        ),
        figures["rounds"],
    )  # fmt: skip
    yield _table(
        "Policy versions: what the agent's training traffic did under each (means per rollout)",
        (
            "policy={version}", "rollouts={rollouts}", "success={success:.3f}", "tool failures={tool_failures:.2f}",
            "turns={turns:.2f}", "prompt tok={prompt_tokens:.0f}", "completion tok={completion_tokens:.0f}",
            "out of turns={share_ran_out:.2f}",
        ),
        figures["versions"],
    )  # fmt: skip
    yield _behaviour_table(figures)
    sets = {"held-out before": "before", "held-out after": "after", "hard set before": "hard_before",
            "hard set after": "hard_after"}  # fmt: skip
    yield _table(
        "Tasks that were never trained on: success at temperature 1, and greedily",
        (
            "tasks={set} ({model})", "count={tasks}", "rollouts={rollouts}", "sampled={success:.3f}",
            "95% interval={low:.3f} to {high:.3f}", "greedy={greedy_success:.3f}",
            "95% interval={greedy_low:.3f} to {greedy_high:.3f}", "tool failures={tool_failures:.2f}",
            "turns={turns:.2f}",
        ),
        [{"set": name, **figures[key]} for name, key in sets.items() if figures[key]],
    )  # fmt: skip


def _behaviour_table(figures: Row) -> Any:
    """What changed in behaviour, by version: in the training traffic, and greedily on the held-out tasks."""
    rows = [{"policy": row["version"], **row["behaviour"]} for row in figures["versions"]]
    held_out = (figures["before"], figures["after"])
    rows += [{"policy": f"greedy, {row['model']}", **row["greedy_behaviour"]} for row in held_out]
    for row in rows:
        row["answers"] = ", ".join(f"{answer!r} {share:.0%}" for answer, share in row["sequences"].items())
        row["commonest"] = next((f"{name} {share:.0%}" for name, share in row["sequences"].items()), "none 0%")
        row["searches"] = row["tools"].get("search_inbox", 0.0)
    if not any(row["tools"] for row in rows):  # an agent without tools is its answers
        title = "Behaviour: the commonest answers, and their shares of the rollouts"
        return _table(title, ("policy={policy}", "answers={answers}"), rows)
    return _table(
        "Behaviour (per rollout; read first: of the answers, those after reading a mail)",
        (
            "policy={policy}", "searches={searches:.2f}", "mails read={mails_read:.2f}", "answers={answered:.0%}",
            "read first={read_before_answer:.0%}", "commonest sequence of tools={commonest}",
        ),
        rows,
    )  # fmt: skip


def _table(title: str, columns: Sequence[str], rows: Iterable[Row]) -> Any:
    """Return a table; a column is its name and the format of its cells: `success={success:.3f}`."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column.partition("=")[0], justify="right" if number else "left")
    for row in rows:
        table.add_row(*(column.partition("=")[2].format(**row) for column in columns))
    return table


def _summary(figures: Row) -> list[str]:
    before, after = figures["before"], figures["after"]
    share = figures["tokens_trained_from_engine"] / figures["tokens_trained"] if figures["tokens_trained"] else 0.0
    stages = ", ".join(f"{name} {value:.0f} s" for name, value in figures["seconds_by_stage"].items())
    dropped = ", ".join(f"{count} {name}" for name, count in figures["dropped"].items())
    policies = {
        "immediate": "a proven version is live at once, since a training set has no users to protect",
        "guarded": "a proven version serves beside the live one first, and is rolled back on evidence of harm",
    }
    likeliest = f"likeliest behaviour: {before['greedy_success']:.1%} -> {after['greedy_success']:.1%} right"
    name, first, last = "held-out tasks by kind", before, after
    if figures["hard_before"]:
        name, first, last = "hard set, never trained", figures["hard_before"], figures["hard_after"]
        read = [row["greedy_behaviour"]["read_before_answer"] for row in (before, after)]
        likeliest += f"; a mail is read before {read[0]:.0%} -> {read[1]:.0%} of the answers"
    kinds = (
        f"{kind} {success:.0%} -> {last['success_by_kind'][kind]:.0%}"
        for kind, success in first["success_by_kind"].items()
    )
    verdict = "the agent improved" if figures["learned"] else "NO proven improvement: the intervals overlap"
    return [
        f"versions {len(figures['rounds'])}, proven {figures['versions_proven']}, swaps {figures['swaps']}, "
        f"calls {figures['calls']}, failed calls {figures['failed_calls']}, "
        f"trajectories of mixed versions {figures['mixed_version_trajectories']}",
        f"trained tokens {figures['tokens_trained']}, sampled by vLLM {share:.1%}; token-exact continuations "
        f"{figures['exact_context_share']:.1%}; mean |trainer - engine| {figures['mismatch_mean']:.5f} nats",
        f"dropped: {dropped or 'nothing'}",
        f"{figures['seconds_total']:.0f} s in all: {stages}",
        f"release policy {figures['release_policy']}: {policies[figures['release_policy']]}",
        f"{name}: {', '.join(kinds)}",
        likeliest,
        f"held-out success {before['success']:.1%} -> {after['success']:.1%}: {verdict}",
    ]
