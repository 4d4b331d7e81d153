"""Shared prefixes: packs rows with a common prefix into one sequence that contains the prefix once. Pure.

The members of a group share their root prompt; the rows of a forked trajectory share everything before the fork. In
the tree layout each token attends to the earlier tokens of its own rows only, at its position in the row, so hidden
states and gradients equal those of separate rows. Attention over one long sequence costs more than over several short
ones, so rows are packed only if the saved tokens cost more than that. A tree has at most MAX_TREE_TOKENS: its mask has
the square of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Ids = Sequence[int]

MAX_TREE_TOKENS = 8192  # whose mask has 128 MiB in bf16


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Rows laid out as one sequence.

    ids        of the sequence, (L,)
    positions  of its tokens in their rows, (L,)
    until      (L,); the tokens after a token and before its `until` belong to rows that contain it, and attend to it
    paths      for each row the places of its tokens in the sequence, in order
    """

    ids: list[int]
    positions: list[int]
    until: list[int]
    paths: list[list[int]]


def prefix_tree(rows: Sequence[Ids]) -> PrefixTree:
    """Lay out rows; neighbors share their common prefix (`pack_rows` sorts them)."""
    layout = PrefixTree([], [], [], [])
    previous: Ids = ()
    path: list[int] = []  # places of the previous row's tokens
    for row in rows:
        shared = common_length(previous, row)
        for place in path[shared:]:
            layout.until[place] = len(layout.ids)
        path = path[:shared] + list(range(len(layout.ids), len(layout.ids) + len(row) - shared))
        layout.ids.extend(row[shared:])
        layout.positions.extend(range(shared, len(row)))
        layout.until.extend([0] * (len(row) - shared))
        layout.paths.append(path)
        previous = row
    for place in path:
        layout.until[place] = len(layout.ids)
    return layout


def pack_rows(rows: Sequence[Ids], *, max_length: int, pairs_per_token: float) -> list[list[int]]:
    """Return row indices by sequence; a sequence of several rows has at most `max_length` and MAX_TREE_TOKENS tokens.

    `pairs_per_token` is the number of token pairs whose attention costs as much as one token in all other layers. A
    single row is causal, which is half of all pairs; a tree needs its full mask.
    """
    packs: list[list[int]] = []
    previous: Ids = ()
    length, cost = 0, 0.0  # of the last sequence
    most = min(max_length, MAX_TREE_TOKENS)
    for index in sorted(range(len(rows)), key=lambda place: tuple(rows[place])):
        row = rows[index]
        own_cost = len(row) * (pairs_per_token + len(row) / 2)
        joint_length = length + len(row) - common_length(previous, row)
        joint_cost = joint_length * (pairs_per_token + joint_length)
        if packs and joint_length <= most and joint_cost < cost + own_cost:
            packs[-1].append(index)
            length, cost = joint_length, joint_cost
        else:
            packs.append([index])
            length, cost = len(row), own_cost
        previous = row
    return packs


def common_length(one: Ids, other: Ids) -> int:
    """Return the length of the common prefix of two rows."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # bisection: comparing slices is much faster than comparing tokens
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
