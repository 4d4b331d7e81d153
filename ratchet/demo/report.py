"""The demo's figures, as one dict: counts and means of the agent's results and of rows in the store.

They become tables for people, `result.json` for programs and a learning curve as PNG. A missing row is an error.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from ratchet.output import drawing, print_table
from ratchet.store.records import Call, Round
from ratchet.store.states import CallState, PolicyState, RoundState
from ratchet.store.statistics import wilson
from ratchet.store.store import Store

RESULT = "result.json"
CURVE = "learning_curve.png"
Row = Mapping[str, Any]
_NOT_PROVEN = (PolicyState.CANDIDATE, PolicyState.UNPROVEN, PolicyState.REJECTED)
_WINDOW = 128  # rollouts of a point of the curve
_POLICIES = {
    "immediate": "a proven version is live at once, since a training set has no users to protect",
    "guarded": "a proven version serves beside the live one first, and is rolled back on evidence of harm",
}


def read_results(store: Store, alias: str, folder: Path, about: Row, seconds: Mapping[str, float]) -> dict[str, Any]:
    """Return the figures of a finished run: `about` it, and those of its results in `folder` and of the store."""
    before, after = read_evaluation(folder, "before"), read_evaluation(folder, "after")
    train = _read_rows(folder / "train.jsonl")
    by_version: defaultdict[str, list[Row]] = defaultdict(list)
    for row in train:
        by_version[" ".join(row["models"]) or "no answer"].append(row)
    return {
        "held_out_tasks": after["tasks"],
        "held_out_success_before": before["sampled"]["success"],
        "held_out_success_after": after["sampled"]["success"],
        "held_out_greedy_before": before["greedy"]["success"],
        "held_out_greedy_after": after["greedy"]["success"],
        "learned": after["sampled"]["low"] > before["sampled"]["high"],  # the two 95% intervals do not overlap
        "seconds_total": round(sum(seconds.values()), 2),
        "seconds_by_stage": {name: round(value, 2) for name, value in seconds.items()},
        **about,
        "before": before,
        "after": after,
        "curve": [
            (end, _mean(row["success"] for row in train[end - _WINDOW : end]))
            for end in range(_WINDOW, len(train) + 1, _WINDOW // 4)
        ],
        "versions": [
            {"policy": version, **measure(by_version[version])}
            for version in sorted(by_version, key=lambda name: (len(name), name))
        ],
        **_figures_of_store(store, alias),
    }


def _figures_of_store(store: Store, alias: str) -> dict[str, Any]:
    calls, policies = list(_all_calls(store)), [policy for policy in store.policies.all(alias) if policy.version]
    rounds = [held for held in store.rounds.page(alias, limit=1000) if held.state is RoundState.COMMITTED][::-1]
    left_out: Counter[str] = Counter()
    for held in rounds:
        left_out.update(held.metrics["untrained_tokens"])
        if held.metrics["rows_rejected"]:  # all rows of a round are compared, rejected ones as well
            left_out["rejected"] += int(held.metrics["tokens_compared"] - held.metrics["tokens_trained"])
    served = Counter(trajectory for trajectory, _ in {(call.trajectory_id, call.version) for call in calls})
    compared = [held.metrics["tokens_compared"] for held in rounds]
    differences = [held.metrics["logprob_abs_diff_mean"] for held in rounds]
    evidence = {policy.version: policy for policy in policies}
    return {
        "rounds": [
            {
                "version": held.to_version,
                "state": str(evidence[held.to_version or 0].state),
                "proofs": list(evidence[held.to_version or 0].evidence.get("proof", {}).values()),
                **held.metrics,
            }
            for held in rounds
        ],
        "swaps": sum(policy.state in (PolicyState.LIVE, PolicyState.RETIRED) for policy in policies),
        "versions_proven": sum(policy.state not in _NOT_PROVEN for policy in policies),
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
        "mismatch_mean": fmean(differences, weights=compared) if any(compared) else 0.0,
    }


def _all_calls(store: Store) -> Iterator[Call]:
    before = None
    while page := store.calls.page(limit=1000, before=before):
        yield from page
        before = page[-1].id


def _engine_tokens(store: Store, calls: Sequence[Call], rounds: Sequence[Round]) -> int:
    """Return how many token ids vLLM returned for the trajectories that were trained."""
    trained = {name for held in rounds for name in store.trajectories.trained_in_round(held.id, limit=100_000)}
    return sum(len(choice.token_ids) // 4 for call in calls if call.trajectory_id in trained for choice in call.choices)


def _read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_evaluation(folder: Path, name: str) -> dict[str, Any]:
    """Return what one version does on the held-out tasks, sampled at temperature 1 and greedily (once per task)."""
    sampled, greedy = (_read_rows(folder / f"{name}_{how}.jsonl") for how in ("sampled", "greedy"))
    by_kind: defaultdict[str, list[bool]] = defaultdict(list)
    for row in sampled:
        by_kind[row["task_id"].partition("-")[0]].append(row["success"])
    return {
        "model": " ".join(sorted({model for row in sampled for model in row["models"]})),
        "tasks": len({row["task_id"] for row in sampled}),
        "sampled": measure(sampled),
        "greedy": measure(greedy),
        "success_by_kind": {kind: fmean(found) for kind, found in sorted(by_kind.items())},
    }


def measure(rows: Sequence[Row]) -> dict[str, Any]:
    """Return success with its 95% interval, and what the agent did: means per rollout.

    `read_first` is the share of the answers that were given after a mail was opened. `commonest` are the three
    commonest sequences of tools, or answers of an agent without tools, with their shares of the rollouts.
    """
    low, high = wilson(sum(row["success"] for row in rows), len(rows))
    commonest = Counter(_behaviour(row) for row in rows).most_common(3)
    return {
        "rollouts": len(rows),
        "success": _mean(row["success"] for row in rows),
        "low": low,
        "high": high,
        "turns": _mean(row["turns"] for row in rows),
        "tool_failures": _mean(sum(row["tool_failures"].values()) for row in rows),
        "mails_read": _mean(row["mails_read"] for row in rows),
        "read_first": _mean(row["mails_read"] > 0 for row in rows if row["end"] == "answer"),
        "commonest": {name: times / len(rows) for name, times in commonest},
    }


def _behaviour(row: Row) -> str:
    if not row["tools"] and row["end"] == "answer":
        return repr(row["answer"])
    return " > ".join([*row["tools"], *([] if row["end"] == "answer" else [f"({row['end']})"])])


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
    ends, shares = [end for end, _ in figures["curve"]], [share for _, share in figures["curve"]]
    with drawing(path) as axes:
        axes.plot(ends, shares, color="tab:blue", label="training tasks, last 128")
        for place, name in ((0, "before"), (ends[-1] if ends else 1, "after")):
            row = figures[name]["sampled"]
            # max: rounding would give -0.0...1
            reach = [[max(0.0, row["success"] - row["low"])], [max(0.0, row["high"] - row["success"])]]
            label = "held-out tasks, 95% interval" if place == 0 else None
            axes.errorbar([place], [row["success"]], yerr=reach, fmt="o", color="tab:red", capsize=4, label=label)
        title = (
            f"The agent gets better ({Path(figures['base_model']).name}, {figures['dtype']}, seed {figures['seed']})"
        )
        axes.set(xlabel="rollouts", ylabel="success", ylim=(0, 1.02), title=title)
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")


def show(figures: Row) -> None:
    """Print the tables and the verdict."""
    rounds, versions = _tables(figures)
    print_table(rounds)
    print_table(versions, _summary(figures))


def _tables(figures: Row) -> Iterator[Any]:
    rounds = [
        {**row, "proof": max((proof["served_vs_trainer"] for proof in row["proofs"]), default=float("nan"))}
        for row in figures["rounds"]
    ]
    yield _table(
        "Rounds: what the trainer learnt from (rejected: rollouts; k3, mismatch and proof in nats per token)",
        (
            "version=@{version}", "state={state}", "groups={groups:.0f}", "rollouts={trajectories:.0f}",
            "reward={reward:.3f}", "tokens={tokens_trained:.0f}", "rejected={rows_rejected:.0f}", "loss={loss:+.4f}",
            "k3={approx_kl:.5f}", "mismatch={logprob_abs_diff_mean:.5f}", "proof={proof:.5f}", "s={seconds:.1f}",
        ),
        rounds,
    )  # fmt: skip
    evaluations = [
        {"policy": f"{row['model']}, {how}", **row[how]}
        for row in (figures["before"], figures["after"]) for how in ("sampled", "greedy")
    ]  # fmt: skip
    rows = [*figures["versions"], *evaluations]
    has_tools = any(row["turns"] > 1 for row in rows)
    for row in rows:
        shown = [f"{name} {share:.0%}" for name, share in row["commonest"].items()]
        row["behaviour"] = ", ".join(shown[: 1 if has_tools else 3])
    yield _table(
        "Versions: training traffic, then held-out tasks, sampled at temperature 1 and greedily"
        + ("; read first: of the answers, those after reading a mail" if has_tools else ""),
        (
            "policy={policy}", "rollouts={rollouts}", "success={success:.3f}", "95% interval={low:.3f} to {high:.3f}",
            *(("turns={turns:.2f}", "failures={tool_failures:.2f}", "read first={read_first:.0%}")
              if has_tools else ()),
            "commonest behaviour={behaviour}",
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
    kinds = (
        f"{kind} {old:.0%} -> {after['success_by_kind'][kind]:.0%}" for kind, old in before["success_by_kind"].items()
    )
    greedy = before["greedy"], after["greedy"]
    likeliest = f"likeliest behaviour: {greedy[0]['success']:.1%} -> {greedy[1]['success']:.1%} right"
    if any(row["mails_read"] for row in greedy):
        read = " -> ".join(f"{row['read_first']:.0%}" for row in greedy)
        likeliest += f"; a mail is read before {read} of the answers"
    verdict = "the agent improved" if figures["learned"] else "NO proven improvement: the intervals overlap"
    return [
        f"versions {len(figures['rounds'])}, proven {figures['versions_proven']}, swaps {figures['swaps']}, "
        f"calls {figures['calls']}, failed calls {figures['failed_calls']}, "
        f"trajectories of mixed versions {figures['mixed_version_trajectories']}",
        f"trained tokens {figures['tokens_trained']}, sampled by vLLM {share:.1%}; token-exact continuations "
        f"{figures['exact_context_share']:.1%}; mean |trainer - engine| {figures['mismatch_mean']:.5f} nats",
        f"dropped: {dropped or 'nothing'}",
        f"{figures['seconds_total']:.0f} s in all: {stages}",
        f"release policy {figures['release_policy']}: {_POLICIES[figures['release_policy']]}",
        f"held-out tasks by kind: {', '.join(kinds)}",
        likeliest,
        f"held-out success {before['sampled']['success']:.1%} -> {after['sampled']['success']:.1%}: {verdict}",
    ]
