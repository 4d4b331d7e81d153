"""Which candidate is published next, where several wait: what was learnt comes before prompts, the newest of each.

A version that was learnt stands for a round that trained, so it is never put aside for a prompt that waits. A prompt
serves on whatever adapter is live when its turn comes: where that is another one than it was made for, it is made anew
on it. What else is older than the live version, which only a person brings about, can never be live: it is rejected.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ratchet.store.errors import InvalidTransition
from ratchet.store.records import Policy
from ratchet.store.states import PolicyState
from ratchet.store.store import Store

log = logging.getLogger(__name__)


def next_candidate(store: Store, alias: str) -> Policy | None:
    """Return the candidate whose turn it is; what it overtakes is rejected. Raises InvalidTransition,
    RecordNotFound.
    """
    live = store.policies.live().get(alias)
    waiting = [policy for policy in store.policies.all(alias) if policy.state is PolicyState.CANDIDATE]
    if live is not None:
        waiting = [policy for policy in waiting if not _put_aside(store, policy, live)]
    chosen = _first(waiting)
    if chosen is None or live is None:
        return chosen
    for older in waiting:
        if older is not chosen and is_trained(older) == is_trained(chosen):
            store.policies.reject(alias, older.version, {}, reason="a newer version came first")
    if is_trained(chosen):
        return store.policies.adopt_prompt(alias, chosen.version) if chosen.prompt_id != live.prompt_id else chosen
    return chosen if chosen.served_name == live.served_name else _rebase_prompt(store, chosen, live)


def is_trained(policy: Policy) -> bool:
    """Return whether a round made the version; else it is another one's adapter with another prompt."""
    return policy.round_id is not None


def name_of(policy: Policy) -> str:
    """Return what people call a version; vLLM's name of it may be another one's."""
    return f"{policy.alias}@{policy.version}"


def _put_aside(store: Store, policy: Policy, live: Policy) -> bool:
    """Reject what was overtaken by what is live, and say so; a prompt for another adapter is made anew instead."""
    late = policy.version < live.version and (is_trained(policy) or policy.served_name == live.served_name)
    if late:
        reason = f"{name_of(live)}, which is newer, became live first"
        if is_trained(policy) and not is_trained(live):
            reason += f"; it serves {live.served_name}, and what {name_of(policy)} learnt is lost"
            log.warning("event=learning_lost policy=%s reason=%r", name_of(policy), reason)
        store.policies.reject(policy.alias, policy.version, {}, reason=reason)
    return late


def _first(waiting: Sequence[Policy]) -> Policy | None:
    learnt = [policy for policy in waiting if is_trained(policy)]
    return next(iter((learnt or list(waiting))[-1:]), None)


def _rebase_prompt(store: Store, chosen: Policy, live: Policy) -> Policy | None:
    """Return the same prompt on the adapter that is live; None where it is live there already."""
    made = None
    reason = f"its prompt is live already, in {live.alias}@{live.version}"
    try:
        made = store.policies.with_prompt(chosen.alias, chosen.prompt_id, chosen.evidence)
        reason = f"made anew as {made.alias}@{made.version}: {live.served_name} came first"
    except InvalidTransition as refused:
        log.info("event=prompt_not_made_anew policy=%s@%d reason=%r", chosen.alias, chosen.version, str(refused))
    store.policies.reject(chosen.alias, chosen.version, {}, reason=reason)
    return made
