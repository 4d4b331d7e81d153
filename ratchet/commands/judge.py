"""The `ratchet judge` commands: try, show, lint, rescore and calibrate judges."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import click

from ratchet import options
from ratchet.commands.feedback import feedback_line
from ratchet.output import plain, prints_json, progress_bars, show, strip_control_characters

if TYPE_CHECKING:
    from ratchet.settings.project_settings import Settings
    from ratchet.store.operation_records import Rollout
    from ratchet.store.records import Group
    from ratchet.store.store import Store
    from ratchet.trainer.judges.judgement import Judge
    from ratchet.trainer.judges.quality import Calibration, Comparison, LintTranscript

EXIT_NOT_CHECKED = 3  # the judge reads nothing that the lint can vary
_NO_JUDGE = "no judge is set: give --judge module:function or a YAML file, or set trainer.judge"
_SHOWN = 10  # trajectories with the largest change
_MARKS = {"ok": "ok", "fooled": "FOOLED", "crashed": "CRASH", "no_return": "NONE"}

_limit = options.number("--limit", 50, "Maximum number of groups.", most=1000)


@click.group()
def judge() -> None:
    """Try, show, lint and compare judges.

    \b
    Example:
      ratchet judge lint --judge my_agent.judge:judge --task capital --answer Oslo --wrong Rome
    """


def _settings(context: click.Context) -> Settings:
    """Return the settings with the judge that is given, else the agent's. Raises SettingsError."""
    settings = options.read_project_settings(context)
    return settings if context.params["judge"] is not None else options.one_agent(settings)


def _with_judge(command: Callable[..., int]) -> Callable[..., int]:
    """Give a command the options of a judge and of its store; pass it the settings."""
    command = options.with_settings(_settings)(command)
    for add in (options.as_json, options.project, options.store_url, options.alias, options.judge):
        command = add(command)
    return command


@contextmanager
def _judge(settings: Settings) -> Iterator[Judge]:
    from ratchet.api.context import judge_of

    with judge_of(settings) as made:
        if made is None:
            raise click.UsageError(_NO_JUDGE)
        yield made


@judge.command("try")
@click.argument("names", nargs=-1, metavar="[TRAJECTORY...]")
@click.option("--task", help="Task of --response: its row as JSON, or its key.")
@click.option("--response", help="Judge this response in place of stored trajectories.")
@_with_judge
def try_(settings: Settings, names: tuple[str, ...], task: str | None, response: str | None) -> int:
    """Judge stored trajectories as one group, or one response to a task. Records nothing.

    A judge that reads `trajectory` or `tool_outcomes` needs stored trajectories.

    \b
    Example:
      ratchet judge try traj_01J8 traj_01J9 --judge my_agent.judge:judge
      ratchet judge try --task '{"answer": "Oslo"}' --response "It is Oslo." --judge my_agent.judge:judge
    """
    if bool(names) == (response is not None) or (task is not None and response is None):
        raise click.UsageError("give trajectories, or --response with the --task that it answers")
    if response is not None:
        from ratchet.api.try_out import try_judge

        if not settings.has_judge:
            raise click.UsageError(_NO_JUDGE)
        judged = try_judge(settings.given_in("trainer")["judge"], _row_or_key(task), response)
        show(judged, [_joined(f"{judged.score:g}", _components(judged.components), judged.explanation)])
        return 0
    with options.open_store_for_command(settings.store_url) as store, _judge(settings) as made:
        verdicts = made.judge(None, [store.trajectories.read(name) for name in names]).verdicts
    lines = [f"{made.name} (version {made.version})", *map(_verdict_line, verdicts)]
    show({"judge": made.name, "version": made.version, "verdicts": verdicts}, lines)
    return int(any(verdict.failure is not None for verdict in verdicts))


def _row_or_key(task: str | None) -> dict[str, Any] | str | None:
    """Return a task's row if it is written as a JSON object, else its key. Raises UsageError."""
    import json

    if task is None or not task.lstrip().startswith("{"):
        return task
    try:
        row: dict[str, Any] = json.loads(task)
    except ValueError as error:
        raise click.UsageError(f"--task is no JSON object: {error}") from error
    return row


@judge.command("show")
@click.argument("group")
@options.as_json
@options.with_store
def show_group(store: Store, group: str) -> None:
    """Show a group: members with version, scenario, step and exception; verdicts; feedback; the versions it trained.

    Also prints the full requests of the judge to a language model, and the responses.

    \b
    Example:
      ratchet judge show grp_01J8
    """
    found = store.groups.get(group)
    members = [store.trajectories.get(name) for name in found.members]
    rollouts = store.rollouts.of_trajectories(found.members)
    verdicts = store.groups.verdict_history(group)
    requests = [_readable(exchange) for exchange in store.groups.judge_requests(group)]
    trained = store.lineage.versions_of(found.members)
    feedback = [one for name in found.members for one in reversed(store.feedback.page(trajectory=name))]
    lines = [f"group {found.id} of {found.alias}, {found.state}, key {found.key}"]
    lines += [f"member  {one.id}  {one.alias}@{one.version}{_rollout(rollouts.get(one.id))}" for one in members]
    lines += map(_verdict_line, verdicts)
    lines += [f"feedback  {feedback_line(one, trained.get(one.trajectory_id or '', ()))}" for one in feedback]
    lines += [f"trained {', '.join(policies)}" for policies in sorted(set(trained.values()))]
    lines += [line for request in requests for line in _request_lines(request)]
    data = {"group": found, "members": members, "rollouts": list(rollouts.values()), "verdicts": verdicts}
    show(data | {"judge_requests": requests, "feedback": feedback, "trained": trained}, lines)


def _readable(judge_request: Any) -> dict[str, Any]:
    """Return a judge request with its request parsed and its response decoded."""
    import msgspec

    response = judge_request.response.decode("utf-8", "replace")
    return plain(judge_request, request=msgspec.json.decode(judge_request.request), response=response)


def _request_lines(record: Mapping[str, Any]) -> Iterator[str]:
    yield f"\n{record['id']}: {record['url']} status {record['status']}, {record['latency']:.1f} s"
    for message in record["request"].get("messages", ()):
        yield f"[{message.get('role')}] {message.get('content')}"
    yield f"[answer] {record['response']}"
    if record["error"]:
        yield f"[not used] {record['error']}"


def _rollout(rollout: Rollout | None) -> str:
    """Describe the rollout of a member: attempt, step, candidate, scenario and failure."""
    if rollout is None:
        return ""
    scenario = "".join(f"  {name}={value}" for name, value in rollout.scenario.items())
    failed = f"  FAILED: {rollout.failure}" if rollout.failure else ""
    return f"  attempt {rollout.attempt}  step {rollout.step}  {rollout.candidate}{scenario}{failed}"


def _verdict_line(verdict: Any) -> str:
    score = "failed" if verdict.score is None else f"{verdict.score:g}"
    words = verdict.failure or verdict.explanation
    return _joined(f"{score:>8}", verdict.trajectory_id, _components(verdict.components), words)


def _components(components: Mapping[str, float]) -> str:
    return " ".join(f"{name}={value:g}" for name, value in components.items())


def _joined(*parts: str) -> str:
    return "  ".join(part for part in parts if part)


@judge.command()
@click.option("--task", help="Task for the judge: its row as JSON, or its key.")
@click.option("--question", default="", help="The user's question.")
@click.option("--answer", "right", help="The correct answer.  [default: that of --trajectory]")
@click.option("--wrong", multiple=True, help="A plausible wrong answer; repeat for more.")
@click.option("--trajectory", metavar="ID", help="Recorded trajectory that solved its task; its answer is replaced.")
@click.option("--tool", metavar="NAME.ARGUMENT", help="Tool argument with the answer, if no message has it.")
@_with_judge
def lint(settings: Settings, wrong: tuple[str, ...], **example: Any) -> int:
    """Try to fool a judge: empty, listed, padded, denied and injected answers must score less than the correct one.

    Exits with 1 if the judge is fooled, crashes or returns nothing, and with 3 if the correct answer scores
    no more than the others.

    \b
    Example:
      ratchet judge lint --judge my_agent.judge:judge --task capital --answer Oslo --wrong Rome --wrong Paris
      ratchet judge lint --judge my_agent.judge:judge --trajectory traj_01J8 --tool finish.answer --wrong Rome
    """
    from ratchet.trainer.judges.quality import LintOutcome
    from ratchet.trainer.judges.quality import lint as try_to_fool

    stage = _stage(settings, **example)
    with _judge(settings) as made:
        report = try_to_fool(made, stage, wrong)
    code = {LintOutcome.SOUND: 0, LintOutcome.NOT_EXAMINED: EXIT_NOT_CHECKED}.get(report.outcome, 1)
    lines = []
    for finding in report.findings:
        score = "-" if finding.score is None else f"{finding.score:g}"
        why = f"  ({finding.failure})" if finding.failure else ""
        answer = "" if finding.sound else f": {finding.answer!r}"
        lines.append(f"{_MARKS[finding.mark]:<6} {score:>8}  {finding.trick}{answer}{why}")
    lines += [f"note: {report.limits}"] if report.limits else []
    data = {"judge": made.name, "version": made.version, "sound": code == 0} | dataclasses.asdict(report)
    show(data, lines)
    if not prints_json():
        click.echo(strip_control_characters(report.reason), err=bool(code))
    return code


def _stage(
    settings: Settings, task: str | None, question: str, right: str | None, trajectory: str | None, tool: str | None
) -> LintTranscript:
    """Return the trajectory for the lint. Raises JudgeError, RecordNotFound, UsageError."""
    from ratchet.trainer.judges.quality import Place, recorded, synthetic

    place = Place.read(tool)
    if trajectory is None:
        if right is None:
            raise click.UsageError(
                "give --answer, the correct answer, or --trajectory, a recorded trajectory that solved its task"
            )
        return synthetic(task, question, right, place)
    with options.open_store_for_command(settings.store_url) as store:
        return recorded(store.trajectories.read(trajectory), right, place)


@judge.command()
@_limit
@_with_judge
def rescore(settings: Settings, limit: int) -> int:
    """Judge stored groups again and show how the scores would change. Records nothing.

    \b
    Example:
      ratchet judge rescore --judge new_judge.yaml --limit 20
    """
    from ratchet.trainer.judges.quality import compare

    compared = []
    with options.open_store_for_command(settings.store_url) as store, _judge(settings) as made:
        for group in _with_progress(_groups(store, limit)):
            old = store.groups.verdicts(group.members)
            if old:
                members = [store.trajectories.read(name) for name in group.members]
                compared.append((old, made.judge(group.id, members).verdicts))
    if not compared:
        raise click.ClickException("no group has a verdict yet")
    changes = compare(compared)
    data = {"judge": made.name, "version": made.version, "groups": len(compared)} | dataclasses.asdict(changes)
    show(data, _change_lines(made.name, len(compared), changes))
    return int(changes.failures > 0)


def _change_lines(name: str, groups: int, changes: Comparison) -> Iterator[str]:
    yield f"{name}: {changes.judged} trajectories of {groups} groups, {changes.failures} failures"
    if changes.failure:
        yield f"commonest failure, {changes.failure_count} of {changes.failures}: {changes.failure}"
    if changes.mean_before is not None:
        means = f"{changes.mean_before:.3f} -> {changes.mean_after:.3f}"
        yield f"mean {means}, mean change {changes.mean_change:.3f}"
        yield f"order within groups (Kendall's tau): {_known(changes.tau, '+.2f')}"
    for trajectory, before, after in changes.moved[:_SHOWN]:
        yield f"  {trajectory}  {before:g} -> {after:g}"


@judge.command()
@click.option(
    "--truth",
    metavar="JUDGE",
    callback=options.read_judge,
    help="Judge that verifies answers: module:function, or a YAML file. Without it, only the noise is measured.",
)
@_limit
@click.option(
    "--min-agreement",
    type=click.FloatRange(0, 1),
    default=0.7,
    show_default=True,
    help="Exit with 1 below this agreement.",
)
@_with_judge
@click.pass_context
def calibrate(context: click.Context, settings: Settings, truth: Any, limit: int, min_agreement: float) -> int:
    """Measure a judge's noise on stored groups, each judged in both orders, and compare it with a verifying judge.

    Records the noise: the trainer trains no group whose spread it explains, from its next start on.

    \b
    Example:
      ratchet judge calibrate
      ratchet judge calibrate --judge ruler.yaml --truth answers.yaml --limit 20
    """
    from ratchet.trainer.judges.quality import NOISE, CalibrationGroup, score_noise
    from ratchet.trainer.judges.quality import calibrate as calibrate_judge

    verifying: Any = nullcontext()
    if truth is not None:
        verifying = _judge(options.read_project_settings(context, {"trainer.judge": truth}))
    compared = []
    with options.open_store_for_command(settings.store_url) as store, _judge(settings) as made, verifying as verifier:
        groups = [group for group in _groups(store, limit) if len(group.members) > 1]
        for group in _with_progress(groups):
            members = [store.trajectories.read(name) for name in group.members]
            first, reverse = (made.judge(None, order).verdicts for order in (members, members[::-1]))
            verified = verifier.judge(None, members).verdicts if verifier else ()
            compared.append(CalibrationGroup(verified, first, reverse))
        noise = score_noise(compared)
        if noise is None:
            raise click.ClickException(
                f"{made.name} scored no two members of any of the {len(compared)} groups in both orders: there is "
                "nothing to measure; let agents attempt a task more than once, or see `ratchet judge try`"
            )
        for alias in sorted({group.alias for group in groups}):
            store.observations.add(alias, NOISE, made.version, dataclasses.asdict(noise))
    data = {"judge": made.name, "version": made.version, "noise": noise.noise, "noise_groups": noise.groups}
    line = (
        f"{made.name}: noise {noise.noise:.3f} (standard deviation of its scores of one answer, "
        f"{noise.trajectories} answers of {noise.groups} groups)"
    )
    if not verifier:
        show(data, [line])
        return 0
    found = calibrate_judge(compared)
    if found.agreement is None:
        raise click.ClickException(
            f"{verifier.name} gives equal scores within each of the {len(compared)} groups with two members or more: "
            "there is nothing to compare the judge with"
        )
    data |= {"truth": verifier.name} | dataclasses.asdict(found)
    show(data, [line, *_calibration_lines(made.name, verifier.name, found)])
    return int(found.agreement < min_agreement)


def _calibration_lines(judge_name: str, truth_name: str, found: Calibration) -> list[str]:
    return [
        f"{judge_name} against {truth_name}: {found.trajectories} trajectories of {found.groups} groups, "
        f"{found.failures} failures",
        f"agreement {found.agreement:.1%} of {found.pairs} pairs (95% {found.low:.1%} to {found.high:.1%})",
        f"order within groups (Kendall's tau-b): {_known(found.tau, '+.2f')}; mean score of the better minus that of "
        f"the worse: {_known(found.gap, '+.3f')}",
        f"in reverse order {_known(found.swapped, '.1%')} of its pairs swap, and scores change by {found.moved:.3f} on "
        "average",
    ]


def _known(value: float | None, form: str) -> str:
    return "unknown" if value is None else format(value, form)


def _groups(store: Store, limit: int) -> list[Group]:
    return store.groups.page(limit, alias=click.get_current_context().params["model"])


def _with_progress(groups: Sequence[Group]) -> Iterator[Group]:
    """Yield the groups, with a progress bar on stderr."""
    with progress_bars() as report_progress:
        for group in groups:
            yield group
            report_progress("judging groups", 1, len(groups))
