"""Which trajectory a conversation continues if its path has changed: by the tool-call ids and answers that it holds.

An edited system prompt, a dropped beginning or a rewritten turn changes every path after it, but the answers
themselves are still in the prompt. One distinctive tool-call id is proof, and a tool call with another such id is
another answer. Answers must belong to exactly one trajectory: if several trajectories gave all of them, the match is
ambiguous, unless the messages before the answers are identical.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from ratchet.proxy.coordinator.linking.leaf_index import LeafIndex
from ratchet.proxy.messages.link_records import Leaf, LinkEvidence
from ratchet.proxy.messages.text_fingerprints import is_distinctive_id, short_key
from ratchet.store.content import messages as canon

BY_IDS, BY_ANSWER = "tool_ids", "answer"
_MAX_MESSAGES = 64  # of the assistant or a tool, searched from the end

LeafFilter = Callable[[Leaf], bool]


def find_continued_leaf(
    leaves: LeafIndex, evidence: LinkEvidence, fits: LeafFilter, after: int = -1
) -> tuple[Leaf | None, str]:
    """Return the latest known answer in the messages and how it was found; None if no trajectory is certain.

    With `after`, only the messages after this place count, and the trajectories that fit are those of the answer there:
    answers that are not distinctive count too.
    """
    matches = [match for match in islice(_matches(leaves, evidence, fits, after + 1), _MAX_MESSAGES) if any(match)]
    by_ids = next((_only_trajectory(ids) for ids, _ in matches if _only_trajectory(ids)), None)
    if by_ids is not None:
        own = (leaf for ids, answers in matches for leaf in reversed([*answers, *ids]) if leaf.trajectory_id == by_ids)
        return next(own), BY_IDS
    answers = [found for _, found in matches if found]
    return (_match_answers(answers, trajectory_known=after >= 0), BY_ANSWER) if answers else (None, "")


def repeats_any(leaves: LeafIndex, evidence: LinkEvidence, fits: LeafFilter) -> bool:
    """Return whether the messages have any known answer or tool-call id."""
    return any(any(match) for match in islice(_matches(leaves, evidence, fits), _MAX_MESSAGES))


def choose_leaf(equal: Iterable[Leaf]) -> Leaf | None:
    """Return the most likely of equal answers: the latest of one trajectory, or any free one if all pasts are equal."""
    found = list(equal)
    if _only_trajectory(found) is not None:
        return max(found, key=lambda leaf: (leaf.created_at, -leaf.choice))
    if len({leaf.link_key for leaf in found}) != 1:
        return None
    free = [leaf for leaf in found if not (leaf.is_extended or leaf.is_quoted)]
    return max(free, key=preference, default=None)


def preference(leaf: Leaf) -> tuple[bool, bool, float, int]:
    """Return the sort key of equal answers, the best one last: agents continue the first of several choices."""
    return not leaf.is_taken, not leaf.is_extended, leaf.created_at, -leaf.choice


def best_of_path(evidence: LinkEvidence, place: int, found: Sequence[Leaf]) -> tuple[Leaf | None, str]:
    """Return the best leaf of one path, and how it was distinguished from the others; None if all are other answers."""
    key = short_key(evidence.keys[place])
    exact = [leaf for leaf in found if leaf.link_key == key]
    ids = canon.tool_call_ids(evidence.messages[place])
    same_ids = [leaf for leaf in found if leaf.tool_call_ids == ids] if ids else []
    equal = same_ids or exact or [leaf for leaf in found if not _is_other_answer(leaf, ids)]
    if not equal:
        return None, ""
    best = max(equal, key=preference) if len(equal) > 1 else equal[0]
    by = "graph" if best.link_key == key else "graph+gap"
    return best, "graph+tool_ids" if same_ids and by == "graph" else by


def shared_trajectories(groups: Iterable[Iterable[Leaf]]) -> set[str]:
    """Return the trajectories that occur in every group."""
    shared: set[str] | None = None
    for group in groups:
        own = {leaf.trajectory_id for leaf in group}
        shared = own if shared is None else shared & own
    return shared or set()


def _matches(
    leaves: LeafIndex, evidence: LinkEvidence, fits: LeafFilter, first: int = 0
) -> Iterator[tuple[list[Leaf], list[Leaf]]]:
    """Yield, from the last message back to `first`, the leaves of its tool-call ids and the leaves with that answer."""
    answer_keys = canon.keys_of_digests(evidence.answer_digests[-_MAX_MESSAGES * canon.DIGEST_BYTES :])
    for message in reversed(evidence.messages[first:]):
        role = message.get("role")
        if role == "assistant":
            ids = canon.tool_call_ids(message)
            equal = leaves.leaves_at(answer_keys.pop())
            answers = [leaf for leaf in equal if fits(leaf) and not _is_other_answer(leaf, ids)]
            yield [leaf for name in ids for leaf in leaves.leaves_with_tool_call(name) if fits(leaf)], answers
        elif role == "tool":
            called = leaves.leaves_with_tool_call(str(message.get("tool_call_id")))
            yield [leaf for leaf in called if fits(leaf)], []


def _is_other_answer(leaf: Leaf, ids: tuple[str, ...]) -> bool:
    """Return whether the ids of a message's tool calls, if they are random, are not those of an equal answer."""
    return any(map(is_distinctive_id, ids)) and leaf.tool_call_ids not in ((), ids)


def _match_answers(answers: Sequence[Sequence[Leaf]], *, trajectory_known: bool) -> Leaf | None:
    """Return the latest answer of the trajectory that gave them; later answers outweigh earlier ones."""
    by_answer = [{leaf.trajectory_id for leaf in found} for found in answers]
    shared = by_answer[0]
    for trajectories in by_answer[1:]:
        shared = shared & trajectories or shared
    if not trajectory_known and not any(
        leaf.fingerprints.is_distinctive for found in answers for leaf in found if leaf.trajectory_id in shared
    ):
        return None
    return choose_leaf(leaf for leaf in answers[0] if leaf.trajectory_id in shared)


def _only_trajectory(found: Iterable[Leaf]) -> str | None:
    trajectories = {leaf.trajectory_id for leaf in found}
    return trajectories.pop() if len(trajectories) == 1 else None
