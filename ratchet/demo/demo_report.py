"""The demo's report: tables for people, `result.json` for programs, a learning curve as PNG."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from ratchet.demo.demo_results import DemoResults, HeldOutEvaluation
from ratchet.output.files import pyplot

RESULT = "result.json"
CURVE = "learning_curve.png"
_WIDTH = 132  # columns of the tables without a terminal


def show(figures: DemoResults) -> None:
    """Print the tables and the verdict."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH)
    for table in (_rounds_table(figures), *_versions_tables(figures), _heldout_table(figures)):
        console.print(table)
    for line in _summary(figures):
        console.print(line, soft_wrap=True, markup=False)


def write(figures: DemoResults, folder: Path) -> None:
    """Write result.json and the learning curve into the demo's folder; print their paths."""
    path = folder / RESULT
    path.write_text(json.dumps(result(figures), indent=2) + "\n")
    draw(figures, folder / CURVE)
    print(f"figures: {path}\ncurve:   {folder / CURVE}")
    print(describe_next_steps(sys.argv[0], folder))


def describe_next_steps(program: str, folder: Path) -> str:
    """Return the commands that show more of the run. `program` is the path of this command: it may not be on PATH."""
    where = "" if folder.parent == Path(".ratchet").resolve() else f"RATCHET_STATE_DIR={folder.parent} "
    command = where + (program if Path(program).name == "ratchet" else "ratchet")
    project = f"--project {folder.name}"
    return f"more:    {command} status {project}, {command} trajectories list {project}"


def result(figures: DemoResults) -> dict[str, Any]:
    """Return the figures as plain data for result.json."""
    seconds = {name: round(value, 2) for name, value in figures.seconds.items()}
    flat = {
        "held_out_tasks": figures.after.tasks,
        "held_out_success_before": figures.before.success,
        "held_out_success_after": figures.after.success,
        "held_out_greedy_before": figures.before.greedy_success,
        "held_out_greedy_after": figures.after.greedy_success,
        "hard_success_before": figures.hard_before.success if figures.hard_before else None,
        "hard_success_after": figures.hard_after.success if figures.hard_after else None,
        "learned": figures.learned,
        "seconds_total": seconds.pop("total"),
        "seconds_by_stage": seconds,
    }
    content = {
        field.name: getattr(figures, field.name) for field in dataclasses.fields(figures) if field.name != "seconds"
    }
    return flat | {name: _plain(value) for name, value in content.items()}


def draw(figures: DemoResults, path: Path) -> None:
    """Draw success over the agent's rollouts, with the held-out points before and after."""
    plots = pyplot()
    figure, axes = plots.subplots(figsize=(8, 4.5), dpi=120)
    axes.plot(
        [x for x, _ in figures.curve], [y for _, y in figures.curve], color="tab:blue", label="training tasks, last 128"
    )
    end = figures.curve[-1][0] if figures.curve else 1
    for place, evaluation in ((0, figures.before), (end, figures.after)):
        below, above = evaluation.success - evaluation.low, evaluation.high - evaluation.success
        reach = [[max(0.0, below)], [max(0.0, above)]]  # rounding may leave -0.0...1 at the ends
        label = "held-out tasks, 95% interval" if place == 0 else None
        axes.errorbar([place], [evaluation.success], yerr=reach, fmt="o", color="tab:red", capsize=4, label=label)
    axes.set(xlabel="rollouts", ylabel="success", ylim=(0, 1.02), title=f"The agent gets better ({_run_name(figures)})")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path)
    plots.close(figure)


def _run_name(figures: DemoResults) -> str:
    model = "" if figures.hard_before else f"{Path(figures.base_model).name}, {figures.dtype}, "
    return f"{model}seed {figures.seed}"


def _rounds_table(figures: DemoResults) -> Any:
    columns = ("version", "state", "groups", "rollouts", "reward", "tokens", "rejected", "loss", "k3", "mismatch")
    title = "Rounds: what the trainer learnt from (rejected: rollouts; k3, mismatch and proof in nats per token)"
    table = _table(title, (*columns, "proof", "s"))
    for row in figures.rounds:
        table.add_row(
            f"@{row.version}", row.state, str(row.groups), str(row.trajectories), f"{row.reward:.3f}",
            str(row.tokens_trained), str(row.rows_rejected), f"{row.loss:+.4f}", f"{row.kl:.5f}",
            f"{row.mismatch_mean:.5f}", f"{row.proof:.5f}", f"{row.seconds:.1f}",
        )  # fmt: skip
    return table


def _versions_tables(figures: DemoResults) -> tuple[Any, Any]:
    return _versions_table(figures), _behaviour_table(figures)


def _versions_table(figures: DemoResults) -> Any:
    columns = (
        "policy",
        "rollouts",
        "success",
        "tool failures",
        "turns",
        "prompt tok",
        "completion tok",
        "out of turns",
    )
    table = _table("Policy versions: what the agent's training traffic did under each (means per rollout)", columns)
    for row in figures.versions:
        table.add_row(
            row.version, str(row.rollouts), f"{row.success:.3f}", f"{row.tool_failures:.2f}", f"{row.turns:.2f}",
            f"{row.prompt_tokens:.0f}", f"{row.completion_tokens:.0f}", f"{row.share_ran_out:.2f}",
        )  # fmt: skip
    return table


def _behaviour_table(figures: DemoResults) -> Any:
    """What changed in behaviour, by version: in the training traffic, and greedily on the held-out tasks."""
    rows = [(row.version, row.behaviour) for row in figures.versions]
    rows += [(f"greedy, {row.model}", row.greedy_behaviour) for row in (figures.before, figures.after)]
    if not any(seen.tools for _, seen in rows):  # an agent without tools is its answers
        table = _table("Behaviour: the commonest answers, and their shares of the rollouts", ("policy", "answers"))
        for name, seen in rows:
            table.add_row(name, ", ".join(f"{answer!r} {share:.0%}" for answer, share in seen.sequences.items()))
        return table
    columns = ("policy", "searches", "mails read", "answers", "read first", "commonest sequence of tools")
    table = _table("Behaviour (per rollout; read first: of the answers, those after reading a mail)", columns)
    for name, seen in rows:
        sequence, share = next(iter(seen.sequences.items()), ("none", 0.0))
        table.add_row(
            name, f"{seen.tools.get('search_inbox', 0.0):.2f}", f"{seen.mails_read:.2f}", f"{seen.answered:.0%}",
            f"{seen.read_before_answer:.0%}", f"{sequence} {share:.0%}",
        )  # fmt: skip
    return table


def _heldout_table(figures: DemoResults) -> Any:
    columns = (
        "tasks",
        "count",
        "rollouts",
        "sampled",
        "95% interval",
        "greedy",
        "95% interval",
        "tool failures",
        "turns",
    )
    table = _table("Tasks that were never trained on: success at temperature 1, and greedily", columns)
    rows = (
        ("held-out before", figures.before),
        ("held-out after", figures.after),
        ("hard set before", figures.hard_before),
        ("hard set after", figures.hard_after),
    )
    for name, row in rows:
        if row is None:
            continue
        table.add_row(f"{name} ({row.model})", *_evaluation_cells(row))
    return table


def _evaluation_cells(row: HeldOutEvaluation) -> tuple[str, ...]:
    return (
        str(row.tasks), str(row.rollouts), f"{row.success:.3f}", f"{row.low:.3f} to {row.high:.3f}",
        f"{row.greedy_success:.3f}", f"{row.greedy_low:.3f} to {row.greedy_high:.3f}", f"{row.tool_failures:.2f}",
        f"{row.turns:.2f}",
    )  # fmt: skip


def _summary(figures: DemoResults) -> list[str]:
    share = figures.tokens_trained_from_engine / figures.tokens_trained if figures.tokens_trained else 0.0
    stages = ", ".join(f"{name} {value:.0f} s" for name, value in figures.seconds.items() if name != "total")
    verdict = "the agent improved" if figures.learned else "NO proven improvement: the intervals overlap"
    return [
        f"versions {len(figures.rounds)}, proven {figures.versions_proven}, swaps {figures.swaps}, "
        f"calls {figures.calls}, failed calls {figures.failed_calls}, "
        f"trajectories of mixed versions {figures.mixed_version_trajectories}",
        f"trained tokens {figures.tokens_trained}, sampled by vLLM {share:.1%}; token-exact continuations "
        f"{figures.exact_context_share:.1%}; mean |trainer - engine| {figures.mismatch_mean:.5f} nats",
        "dropped: " + (", ".join(f"{count} {name}" for name, count in figures.dropped.items()) or "nothing"),
        f"{figures.seconds['total']:.0f} s in all: {stages}",
        _release_line(figures),
        _kinds_line(figures),
        _likeliest_line(figures),
        f"held-out success {figures.before.success:.1%} -> {figures.after.success:.1%}: {verdict}",
    ]


def _release_line(figures: DemoResults) -> str:
    described = {
        "immediate": "a proven version is live at once, since a training set has no users to protect",
        "guarded": "a proven version serves beside the live one first, and is rolled back on evidence of harm",
    }
    return f"release policy {figures.release_policy}: {described[figures.release_policy]}"


def _kinds_line(figures: DemoResults) -> str:
    if figures.hard_before and figures.hard_after:
        name, before, after = "hard set, never trained", figures.hard_before, figures.hard_after
    else:
        name, before, after = "held-out tasks by kind", figures.before, figures.after
    kinds = [
        f"{kind} {share:.0%} -> {after.success_by_kind[kind]:.0%}" for kind, share in before.success_by_kind.items()
    ]
    return f"{name}: {', '.join(kinds)}"


def _likeliest_line(figures: DemoResults) -> str:
    """What the policy does when it always takes its likeliest token, before and after."""
    before, after = figures.before.greedy_behaviour, figures.after.greedy_behaviour
    line = f"likeliest behaviour: {figures.before.greedy_success:.1%} -> {figures.after.greedy_success:.1%} right"
    if not figures.hard_before:
        return line
    return line + (
        f"; a mail is read before {before.read_before_answer:.0%} -> {after.read_before_answer:.0%} of the answers"
    )


def _table(title: str, columns: tuple[str, ...]) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    return table


def _plain(value: Any) -> Any:
    """Return a value as plain data for JSON."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: _plain(inner) for name, inner in dataclasses.asdict(value).items()}
    if isinstance(value, tuple):
        return [_plain(inner) for inner in value]
    return value
