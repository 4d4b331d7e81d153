"""Select the candidate to publish next: trained versions before prompt changes, the newest of each.

A trained version is never rejected in favour of a prompt that waits. A prompt change uses the adapter that is live when
it is published; if that is another adapter than the one it was made for, it is recreated on the live one. Any other
candidate older than the live version can no longer become live, and is rejected.
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
    """Return the candidate to publish next, and skip or reject those that it replaces.

    None while the live version is pinned. Raises InvalidTransition, RecordNotFound.
    """
    live = store.policies.live().get(alias)
    if live is not None and live.pinned_at is not None:
        return None
    waiting = [policy for policy in store.policies.all(alias) if policy.state is PolicyState.CANDIDATE]
    if live is not None:
        waiting = [policy for policy in waiting if not _reject_if_overtaken(store, policy, live)]
    chosen = _newest(waiting)
    if chosen is None or live is None:
        return chosen
    for older in waiting:
        if older is not chosen and is_trained(older) == is_trained(chosen):
            _replace(store, older, "a newer version came first")
    if is_trained(chosen):
        return store.policies.adopt_prompt(alias, chosen.version) if chosen.prompt_id != live.prompt_id else chosen
    return chosen if chosen.served_name == live.served_name else _rebase_prompt(store, chosen, live)


def is_trained(policy: Policy) -> bool:
    """Return whether a round made the version. Otherwise it is another version's adapter with another prompt."""
    return policy.round_id is not None


def version_name(policy: Policy) -> str:
    """Return `alias@version`. vLLM may serve the version under another version's name (`served_name`)."""
    return f"{policy.alias}@{policy.version}"


def _reject_if_overtaken(store: Store, policy: Policy, live: Policy) -> bool:
    """Reject a candidate that is older than the live version; return whether it was.

    A prompt for another adapter stays, because it can be recreated on the live one.
    """
    overtaken = policy.version < live.version and (is_trained(policy) or policy.served_name == live.served_name)
    if overtaken:
        reason = f"{version_name(live)}, which is newer, became live first"
        if is_trained(policy) and not is_trained(live):
            reason += f"; it serves {live.served_name}, and the training of {version_name(policy)} is lost"
            log.warning("event=training_lost policy=%s reason=%r", version_name(policy), reason)
        if is_trained(policy) and is_trained(live):
            _replace(store, policy, reason)
        else:
            store.policies.reject(policy.alias, policy.version, {}, reason=reason)
    return overtaken


def _replace(store: Store, policy: Policy, reason: str) -> None:
    """Release a newer version in its place; a trained one is part of the newer one, so it is not rejected."""
    if is_trained(policy):
        store.policies.skip(policy.alias, policy.version, {}, by="release", reason=reason)
    else:
        store.policies.reject(policy.alias, policy.version, {}, reason=reason)


def _newest(waiting: Sequence[Policy]) -> Policy | None:
    trained = [policy for policy in waiting if is_trained(policy)]
    return next(iter((trained or list(waiting))[-1:]), None)


def _rebase_prompt(store: Store, chosen: Policy, live: Policy) -> Policy | None:
    """Return the same prompt on the live adapter; None if that adapter already serves the prompt."""
    rebased = None
    reason = f"its prompt is live already, in {version_name(live)}"
    try:
        rebased = store.policies.register_prompt_version(chosen.alias, chosen.prompt_id, chosen.evidence)
        reason = f"recreated as {version_name(rebased)}: {live.served_name} came first"
    except InvalidTransition as refused:
        log.info("event=prompt_not_rebased policy=%s reason=%r", version_name(chosen), str(refused))
    store.policies.reject(chosen.alias, chosen.version, {}, reason=reason)
    return rebased
