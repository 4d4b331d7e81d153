"""Which run a conversation belongs to whose path has changed: by the tool-call ids and answers of ours that it holds.

An edited system prompt, a dropped beginning or a rewritten turn changes every path after it; the answers themselves
are still there. One telling id of ours is proof. Answers must be held by exactly one run: where several runs gave them
all, nobody can say which it is, unless what led to them is the same in every message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from ratchet.proxy.coordinator.linking.leaf_index import LeafIndex
from ratchet.proxy.messages.link_records import Leaf
from ratchet.store.content import messages as canon

BY_IDS, BY_ANSWER = "tool_ids", "answer"
_MOST_PLACES = 64  # messages of ours that are looked at, from the end

LeafFilter = Callable[[Leaf], bool]


def continued(
    leaves: LeafIndex, messages: Sequence[dict[str, Any]], fits: LeafFilter, *, sure: bool = False
) -> tuple[Leaf | None, str]:
    """Return the latest answer of ours that the messages hold, and how it was known; None where no run is sure.

    Where the caller is sure of the run, also an answer that tells nothing by itself counts.
    """
    held = [place for place in islice(_held(leaves, messages, fits), _MOST_PLACES) if any(place)]
    by_ids = next((_only_trajectory(ids) for ids, _ in held if _only_trajectory(ids)), None)
    if by_ids is not None:
        own = (leaf for ids, answers in held for leaf in reversed([*answers, *ids]) if leaf.trajectory_id == by_ids)
        return next(own), BY_IDS
    answers = [found for _, found in held if found]
    return (_by_answers(answers, sure), BY_ANSWER) if answers else (None, "")


def choose(alike: Iterable[Leaf]) -> Leaf | None:
    """Return the one that is meant: the latest of a single run, or any that is free where all pasts are the same."""
    found = list(alike)
    if _only_trajectory(found) is not None:
        return max(found, key=lambda leaf: (leaf.created_at, -leaf.choice))
    if len({leaf.link_key for leaf in found}) != 1:
        return None
    free = [leaf for leaf in found if not (leaf.is_extended or leaf.is_quoted)]
    return max(free, key=preference, default=None)


def preference(leaf: Leaf) -> tuple[bool, bool, float, int]:
    """Return what is greatest of the answer that is meant among equal ones: agents go on with the first of several."""
    return not leaf.is_taken, not leaf.is_extended, leaf.created_at, -leaf.choice


def shared_trajectories(groups: Iterable[Iterable[Leaf]]) -> set[str]:
    """Return the runs that are in every group."""
    runs: set[str] | None = None
    for group in groups:
        ours = {leaf.trajectory_id for leaf in group}
        runs = ours if runs is None else runs & ours
    return runs or set()


def _held(
    leaves: LeafIndex, messages: Sequence[dict[str, Any]], fits: LeafFilter
) -> Iterator[tuple[list[Leaf], list[Leaf]]]:
    """Yield, from the last message on, the leaves of its tool-call ids and those that gave it as an answer."""
    for message in reversed(messages):
        role = message.get("role")
        if role == "assistant":
            own = canon.link_key(canon.ANYWHERE, message)
            ids = canon.tool_call_ids(message)
            found = [leaf for leaf in leaves.at(own) if fits(leaf)]
            yield [leaf for name in ids for leaf in leaves.calling(name) if fits(leaf)], found
        elif role == "tool":
            yield [leaf for leaf in leaves.calling(str(message.get("tool_call_id"))) if fits(leaf)], []


def _by_answers(answers: Sequence[Sequence[Leaf]], sure: bool) -> Leaf | None:
    """Return the latest answer of the run that gave them; later ones count more than earlier ones."""
    known = [{leaf.trajectory_id for leaf in found} for found in answers]
    runs = known[0]
    for others in known[1:]:
        runs = runs & others or runs
    told = sure or any(
        leaf.fingerprints.is_distinctive for found in answers for leaf in found if leaf.trajectory_id in runs
    )
    return choose(leaf for leaf in answers[0] if leaf.trajectory_id in runs) if told else None


def _only_trajectory(found: Iterable[Leaf]) -> str | None:
    runs = {leaf.trajectory_id for leaf in found}
    return runs.pop() if len(runs) == 1 else None
