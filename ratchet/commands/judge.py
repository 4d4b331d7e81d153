"""The `ratchet judge` commands: try, show, lint, rescore and calibrate judges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import click

from ratchet import options
from ratchet.commands.feedback import feedback_line
from ratchet.commands.judge_response import print_judgement
from ratchet.output import strip_control_characters

if TYPE_CHECKING:
    from ratchet.settings.project_settings import Settings
    from ratchet.store.operation_records import Rollout
    from ratchet.store.records import Group
    from ratchet.trainer.controller.judges import Judge
    from ratchet.trainer.controller.judges.audit.calibration import Calibration
    from ratchet.trainer.controller.judges.audit.lint_transcripts import LintTranscript

EXIT_NOT_CHECKED = 3  # the judge reads nothing that the lint can vary
_NO_JUDGE = "no judge is set: give --judge module:function or a YAML file, or set trainer.judge"
_SHOWN = 10  # trajectories with the largest change
_MARKS = {"ok": "ok", "fooled": "FOOLED", "crashed": "CRASH", "no_return": "NONE"}


@click.group()
def judge() -> None:
    """Try, show, lint and compare judges.

    \b
    Example:
      ratchet judge lint --judge my_agent.judge:judge --task capital --answer Oslo --wrong Rome
    """


@judge.command("try")
@click.argument("names", nargs=-1, metavar="[TRAJECTORY...]")
@options.judge
@click.option("--task", help="Task of --response: its row as JSON, or its key.")
@click.option("--response", help="Judge this response in place of stored trajectories.")
@options.alias
@options.store_url
@options.project
@options.as_json
@click.pass_context
def try_(
    context: click.Context,
    /,
    names: tuple[str, ...],
    task: str | None,
    response: str | None,
    as_json: bool,
    **given: Any,
) -> int:
    """Judge stored trajectories as one group, or one response to a task. Records nothing.

    A judge that reads `trajectory` or `tool_outcomes` needs stored trajectories.

    \b
    Example:
      ratchet judge try traj_01J8 traj_01J9 --judge my_agent.judge:judge
      ratchet judge try --task '{"answer": "Oslo"}' --response "It is Oslo." --judge my_agent.judge:judge
    """
    if bool(names) == (response is not None) or (task is not None and response is None):
        raise click.UsageError("give trajectories, or --response with the --task that it answers")
    settings = _settings(context, given)
    if response is not None:
        if not settings.has_judge:
            raise click.UsageError(_NO_JUDGE)
        print_judgement(settings.trainer["judge"], task, response, as_json=as_json)
        return 0
    with options.open_store_for_command(settings.store_url) as store, _judge(settings) as made:
        judgement = made.judge(None, [store.trajectories.read(name) for name in names])
    if as_json:
        options.print_json(
            {"judge": made.name, "version": made.version, "verdicts": [_plain(v) for v in judgement.verdicts]}
        )
    else:
        click.echo(f"{made.name} (version {made.version})")
        for verdict in judgement.verdicts:
            click.echo(_line(verdict))
    return int(any(verdict.failure is not None for verdict in judgement.verdicts))


@judge.command()
@click.argument("group")
@options.store_url
@options.project
@options.as_json
@click.pass_context
def show(context: click.Context, /, group: str, as_json: bool, **given: Any) -> None:
    """Show a group: members with version, scenario, step and exception; verdicts; feedback; the versions it trained.

    Also prints the full requests of the judge to a language model, and the responses.

    \b
    Example:
      ratchet judge show grp_01J8
    """
    with options.open_store_for_command(_settings(context, given).store_url) as store:
        found = store.groups.get(group)
        members = [store.trajectories.get(name) for name in found.members]
        rollouts = store.rollouts.of_trajectories(found.members)
        verdicts, judge_requests = store.groups.verdict_history(group), store.groups.judge_requests(group)
        trained = store.lineage.versions_of(found.members)
        feedback = [one for name in found.members for one in reversed(store.feedback.page(trajectory=name))]
    if as_json:
        options.print_json(
            {
                "group": _plain(found),
                "members": [_plain(member) for member in members],
                "rollouts": [_plain(rollout) for rollout in rollouts.values()],
                "verdicts": [_plain(verdict) for verdict in verdicts],
                "judge_requests": [_readable(exchange) for exchange in judge_requests],
                "feedback": [_plain(one) for one in feedback],
                "trained": trained,
            }
        )
        return
    click.echo(f"group {found.id} of {found.alias}, {found.state}, key {found.key}")
    for member in members:
        click.echo(f"member  {member.id}  {member.alias}@{member.version}{_rollout(rollouts.get(member.id))}")
    for verdict in verdicts:
        click.echo(_line(verdict))
    for one in feedback:
        click.echo(f"feedback  {feedback_line(one, trained.get(one.trajectory_id or '', ()))}")
    for policies in sorted(set(trained.values())):
        click.echo(f"trained {', '.join(policies)}")
    for exchange in judge_requests:
        record = _readable(exchange)
        click.echo(f"\n{record['id']}: {record['url']} status {record['status']}, {record['latency']:.1f} s")
        for message in record["request"].get("messages", ()):
            click.echo(f"[{message.get('role')}] {strip_control_characters(message.get('content'))}")
        click.echo(f"[answer] {strip_control_characters(record['response'])}")
        if record["error"]:
            click.echo(f"[not used] {strip_control_characters(record['error'])}")


@judge.command()
@options.judge
@click.option("--task", help="Task for the judge: its row as JSON, or its key.")
@click.option("--question", default="", help="The user's question.")
@click.option("--answer", "right", help="The correct answer.  [default: that of --trajectory]")
@click.option("--wrong", multiple=True, help="A plausible wrong answer; repeat for more.")
@click.option("--trajectory", metavar="ID", help="Recorded trajectory that solved its task; its answer is replaced.")
@click.option("--tool", metavar="NAME.ARGUMENT", help="Tool argument with the answer, if no message has it.")
@options.alias
@options.store_url
@options.project
@options.as_json
@click.pass_context
def lint(context: click.Context, /, as_json: bool, **given: Any) -> int:
    """Try to fool a judge: empty, listed, padded, denied and injected answers must score less than the correct one.

    Exits with 1 if the judge is fooled, crashes or returns nothing, and with 3 if the correct answer scores
    no more than the others.

    \b
    Example:
      ratchet judge lint --judge my_agent.judge:judge --task capital --answer Oslo --wrong Rome --wrong Paris
      ratchet judge lint --judge my_agent.judge:judge --trajectory traj_01J8 --tool finish.answer --wrong Rome
    """
    import dataclasses

    from ratchet.trainer.controller.judges.audit.lint import LintOutcome
    from ratchet.trainer.controller.judges.audit.lint import lint as try_to_fool

    example = {name: given.pop(name) for name in ("task", "question", "right", "wrong", "trajectory", "tool")}
    settings = _settings(context, given)
    stage = _stage(settings, example)
    with _judge(settings) as made:
        report = try_to_fool(made, stage, example["wrong"])
    code = {LintOutcome.SOUND: 0, LintOutcome.NOT_EXAMINED: EXIT_NOT_CHECKED}.get(report.outcome, 1)
    if as_json:
        plain = dataclasses.asdict(report)
        options.print_json({"judge": made.name, "version": made.version, "sound": code == 0} | plain)
        return code
    for finding in report.findings:
        score = "-" if finding.score is None else f"{finding.score:g}"
        why = f"  ({strip_control_characters(finding.failure)})" if finding.failure else ""
        answer = "" if finding.sound else f": {strip_control_characters(repr(finding.answer))}"
        click.echo(f"{_MARKS[finding.mark]:<6} {score:>8}  {finding.trick}{answer}{why}")
    if report.limits:
        click.echo(f"note: {strip_control_characters(report.limits)}")
    click.echo(strip_control_characters(report.reason), err=bool(code))
    return code


def _stage(settings: Settings, example: dict[str, Any]) -> LintTranscript:
    """Return the trajectory for the lint. Raises JudgeError, RecordNotFound, UsageError."""
    from ratchet.trainer.controller.judges.audit.lint_transcripts import Place, recorded, synthetic

    place = Place.read(example["tool"])
    if example["trajectory"] is None:
        if example["right"] is None:
            raise click.UsageError(
                "give --answer, the correct answer, or --trajectory, a recorded trajectory that solved its task"
            )
        return synthetic(example["task"], example["question"], example["right"], place)
    with options.open_store_for_command(settings.store_url) as store:
        return recorded(store.trajectories.read(example["trajectory"]), example["right"], place)


@judge.command()
@options.judge
@click.option("--limit", type=click.IntRange(1, 1000), default=50, show_default=True, help="Maximum number of groups.")
@options.alias
@options.store_url
@options.project
@options.as_json
@click.pass_context
def rescore(context: click.Context, /, limit: int, as_json: bool, **given: Any) -> int:
    """Judge stored groups again and show how the scores would change. Records nothing.

    \b
    Example:
      ratchet judge rescore --judge new_judge.yaml --limit 20
    """
    from ratchet.trainer.controller.judges.audit.rescoring import compare

    settings = _settings(context, given)
    compared = []
    with options.open_store_for_command(settings.store_url) as store, _judge(settings) as made:
        for group in _with_progress(store.groups.page(limit, alias=given["model"])):
            old = store.groups.verdicts(group.members)
            if old:
                members = [store.trajectories.read(name) for name in group.members]
                compared.append((old, made.judge(group.id, members).verdicts))
    if not compared:
        raise click.ClickException("no group has a verdict yet")
    changes = compare(compared)
    if as_json:
        import dataclasses

        options.print_json(
            {"judge": made.name, "version": made.version, "groups": len(compared)} | dataclasses.asdict(changes)
        )
    else:
        order = "unknown" if changes.tau is None else f"{changes.tau:+.2f}"
        click.echo(f"{made.name}: {changes.judged} trajectories of {len(compared)} groups, {changes.failures} failures")
        if changes.failure:
            text = strip_control_characters(changes.failure)
            click.echo(f"commonest failure, {changes.failure_count} of {changes.failures}: {text}")
        if changes.mean_before is not None:
            means = f"{changes.mean_before:.3f} -> {changes.mean_after:.3f}"
            click.echo(f"mean {means}, mean change {changes.mean_change:.3f}")
            click.echo(f"order within groups (Kendall's tau): {order}")
        for name, before, after in changes.moved[:_SHOWN]:
            click.echo(f"  {name}  {before:g} -> {after:g}")
    return int(changes.failures > 0)


@judge.command()
@options.judge
@click.option(
    "--truth",
    "truth_given",
    metavar="JUDGE",
    callback=options.read_judge,
    help="Judge that verifies answers: module:function, or a YAML file. Without it, only the noise is measured.",
)
@click.option("--limit", type=click.IntRange(1, 1000), default=50, show_default=True, help="Maximum number of groups.")
@click.option(
    "--min-agreement",
    type=click.FloatRange(0, 1),
    default=0.7,
    show_default=True,
    help="Exit with 1 below this agreement.",
)
@options.alias
@options.store_url
@options.project
@options.as_json
@click.pass_context
def calibrate(
    context: click.Context, /, truth_given: Any, limit: int, min_agreement: float, as_json: bool, **given: Any
) -> int:
    """Measure a judge's noise on stored groups, each judged in both orders, and compare it with a verifying judge.

    Records the noise: the trainer trains no group whose spread it explains, from its next start on.

    \b
    Example:
      ratchet judge calibrate
      ratchet judge calibrate --judge ruler.yaml --truth answers.yaml --limit 20
    """
    import dataclasses

    from ratchet.trainer.controller.judges.audit.calibration import NOISE, CalibrationGroup, score_noise
    from ratchet.trainer.controller.judges.audit.calibration import calibrate as calibrate_judge

    settings = _settings(context, given)
    compared = []
    with (
        options.open_store_for_command(settings.store_url) as store,
        _judge(settings) as made,
        nullcontext() if truth_given is None else _judge(_settings(context, given | {"judge": truth_given})) as truth,
    ):
        groups = [group for group in store.groups.page(limit, alias=given["model"]) if len(group.members) > 1]
        for group in _with_progress(groups):
            members = [store.trajectories.read(name) for name in group.members]
            first, reverse = (made.judge(None, order).verdicts for order in (members, members[::-1]))
            verified = () if truth is None else truth.judge(None, members).verdicts
            compared.append(CalibrationGroup(verified, first, reverse))
        noise = score_noise(compared)
        if noise is not None:
            for alias in sorted({group.alias for group in groups}):
                store.observations.add(alias, NOISE, made.version, dataclasses.asdict(noise))
    if noise is None:
        raise click.ClickException(
            f"{made.name} scored no two members of any of the {len(compared)} groups in both orders: there is nothing "
            "to measure; let agents attempt a task more than once, or see `ratchet judge try`"
        )
    found = None if truth is None else calibrate_judge(compared)
    if truth is not None and found is not None and found.agreement is None:
        raise click.ClickException(
            f"{truth.name} gives equal scores within each of the {len(compared)} groups with two members or more: "
            "there is nothing to compare the judge with"
        )
    if as_json:
        plain = {"judge": made.name, "version": made.version, "noise": noise.noise, "noise_groups": noise.groups}
        if truth is not None and found is not None:
            plain |= {"truth": truth.name} | dataclasses.asdict(found)
        options.print_json(plain)
        return int(found is not None and (found.agreement or 0.0) < min_agreement)
    click.echo(
        f"{made.name}: noise {noise.noise:.3f} (standard deviation of its scores of one answer, "
        f"{noise.trajectories} answers of {noise.groups} groups)"
    )
    for line in () if truth is None or found is None else _calibration_lines(made.name, truth.name, found):
        click.echo(line)
    return int(found is not None and (found.agreement or 0.0) < min_agreement)


def _calibration_lines(judge_name: str, truth_name: str, found: Calibration) -> list[str]:
    order = "unknown" if found.tau is None else f"{found.tau:+.2f}"
    swapped = "unknown" if found.swapped is None else f"{found.swapped:.1%}"
    gap = "unknown" if found.gap is None else f"{found.gap:+.3f}"
    return [
        f"{judge_name} against {truth_name}: {found.trajectories} trajectories of {found.groups} groups, "
        f"{found.failures} failures",
        f"agreement {found.agreement:.1%} of {found.pairs} pairs (95% {found.low:.1%} to {found.high:.1%})",
        f"order within groups (Kendall's tau-b): {order}; mean score of the better minus that of the worse: {gap}",
        f"in reverse order {swapped} of its pairs swap, and scores change by {found.moved:.3f} on average",
    ]


def _with_progress(groups: Sequence[Group]) -> Iterator[Group]:
    """Yield the groups, with a progress bar on stderr."""
    from ratchet.output import progress_bars

    with progress_bars() as report_progress:
        for group in groups:
            yield group
            report_progress("judging groups", 1, len(groups))


def _settings(context: click.Context, given: dict[str, Any]) -> Settings:
    """Return the settings with the judge that is given, else the agent's. Raises SettingsError."""
    values = {"trainer.judge" if name == "judge" else name: value for name, value in given.items()}
    settings = options.read_project_settings(context, values)
    return settings if given.get("judge") is not None or "judge" not in given else options.one_agent(settings)


@contextmanager
def _judge(settings: Settings) -> Iterator[Judge]:
    from ratchet.api.context import judge_of

    with judge_of(settings) as made:
        if made is None:
            raise click.UsageError(_NO_JUDGE)
        yield made


def _plain(record: Any) -> dict[str, Any]:
    import msgspec

    plain: dict[str, Any] = msgspec.structs.asdict(record)
    return plain


def _readable(judge_request: Any) -> dict[str, Any]:
    """Return a judge request with its request parsed and its response decoded."""
    import msgspec

    response = judge_request.response.decode("utf-8", "replace")
    return _plain(judge_request) | {"request": msgspec.json.decode(judge_request.request), "response": response}


def _rollout(rollout: Rollout | None) -> str:
    """Describe the rollout of a member: attempt, step, candidate, scenario and failure."""
    if rollout is None:
        return ""
    scenario = "".join(f"  {strip_control_characters(f'{name}={value}')}" for name, value in rollout.scenario.items())
    failed = f"  FAILED: {strip_control_characters(rollout.failure)}" if rollout.failure else ""
    candidate = strip_control_characters(rollout.candidate)
    return f"  attempt {rollout.attempt}  step {rollout.step}  {candidate}{scenario}{failed}"


def _line(verdict: Any) -> str:
    score = "failed" if verdict.score is None else f"{verdict.score:g}"
    parts = " ".join(f"{name}={value:g}" for name, value in verdict.components.items())
    words = strip_control_characters(verdict.failure or verdict.explanation)
    return "  ".join(part for part in (f"{score:>8}", verdict.trajectory_id, parts, words) if part)
