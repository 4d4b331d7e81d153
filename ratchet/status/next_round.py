"""The next round: what it waits for, read from the store, for `ratchet status`. Reads only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ratchet.store.states import PolicyState

if TYPE_CHECKING:
    from ratchet.settings import Settings
    from ratchet.store.store import Store

_SEEN = 1000  # groups
_UNDECIDED = (PolicyState.CANDIDATE, PolicyState.CANARY)


def next_round(store: Store, settings: Settings) -> dict[str, Any] | None:
    """Return what the next round has and what it needs; None where nothing is trained."""
    if not settings.trainer.get("judge"):
        return None
    from ratchet.trainer.controller.rounds.round_size import RoundSize

    wanted, least, after, size = (
        _setting(settings, name)
        for name in ("groups_per_round", "min_groups_per_round", "round_wait_seconds", "num_generations")
    )
    judged = store.groups.awaiting_round(settings.model, limit=_SEEN, newest_first=True)
    undecided = [one for one in store.policies.all(settings.model) if one.state in _UNDECIDED]
    return {
        "groups": RoundSize(wanted, size).weight(judged),
        "groups_per_round": wanted,
        "min_groups_per_round": least,
        "round_wait_seconds": after,
        "to_judge": len(store.groups.awaiting_verdict(settings.model, float("inf"), limit=_SEEN)),
        "undecided": [f"{one.served_name} ({one.state})" for one in undecided],
    }


def line(waits: dict[str, Any]) -> str:
    """Return it for people."""
    parts = [
        f"{waits['groups']:g} of {waits['groups_per_round']} groups judged; with fewer it begins after "
        f"{waits['round_wait_seconds']:g} s, never with fewer than {waits['min_groups_per_round']}"
    ]
    if waits["to_judge"]:
        parts.append(f"{waits['to_judge']} groups wait for the judge")
    if waits["undecided"]:
        parts.append(f"waits for the decision on {', '.join(waits['undecided'])}")
    return "; ".join(parts)


def _setting(settings: Settings, name: str) -> Any:
    from ratchet.trainer.settings.trainer_settings import TrainerSettings

    return settings.trainer.get(name, TrainerSettings.model_fields[name].default)
