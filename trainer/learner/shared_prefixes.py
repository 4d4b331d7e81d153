"""Shared prefixes: rows that begin alike as one sequence, in which what they share stands once.

The members of a group share their root prompt, the rows of a forked trajectory all that came before the fork. Laid out
as a tree, each token attends to its own row's earlier tokens and to nothing else, at the position that it has in its
row: hidden states and gradients are those of the rows apart. Attention over one long sequence costs more than over many
short ones, so rows are put together only where the tokens that are spared cost more than that. Pure; does not know
tensors or models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Ids = Sequence[int]


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Rows laid out as one sequence.

    ids        of the sequence, (L,)
    positions  that its tokens have in their rows, (L,)
    until      of each token the place in the sequence up to which tokens are of rows that hold it: those see it that
               come after it and before this, (L,)
    paths      of each row the places of its tokens in the sequence, from its first to its last
    """

    ids: list[int]
    positions: list[int]
    until: list[int]
    paths: list[list[int]]


def tree(rows: Sequence[Ids]) -> PrefixTree:
    """Lay out rows; those that begin alike are shared where they are neighbours, as `together` orders them."""
    found = PrefixTree([], [], [], [])
    before: Ids = ()
    path: list[int] = []  # where the tokens of the row before stand
    for row in rows:
        shared = common(before, row)
        for place in path[shared:]:
            found.until[place] = len(found.ids)
        path = path[:shared] + list(range(len(found.ids), len(found.ids) + len(row) - shared))
        found.ids.extend(row[shared:])
        found.positions.extend(range(shared, len(row)))
        found.until.extend([0] * (len(row) - shared))
        found.paths.append(path)
        before = row
    for place in path:
        found.until[place] = len(found.ids)
    return found


def together(rows: Sequence[Ids], *, longest: int, worth: float) -> list[list[int]]:
    """Indices of rows by the sequence that they are laid out in, of at most `longest` tokens where several share one.

    `worth` is how many pairs of tokens attention goes through at the cost of one token's way through all else. A row by
    itself is causal, which is half of all pairs; a tree's mask is looked at as a whole.
    """
    packs: list[list[int]] = []
    before: Ids = ()
    length, cost = 0, 0.0  # of the newest sequence
    for index in sorted(range(len(rows)), key=lambda place: tuple(rows[place])):
        row = rows[index]
        alone = len(row) * (worth + len(row) / 2)
        joint = length + len(row) - common(before, row)
        jointly = joint * (worth + joint)
        if packs and joint <= longest and jointly < cost + alone:
            packs[-1].append(index)
            length, cost = joint, jointly
        else:
            packs.append([index])
            length, cost = len(row), alone
        before = row
    return packs


def common(one: Ids, other: Ids) -> int:
    """How many tokens two rows share at their beginning."""
    least, most = 0, min(len(one), len(other))
    while least < most:  # by halves: comparing slices is far quicker than comparing tokens
        middle = (least + most + 1) // 2
        if one[least:middle] == other[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least


def _cost(length: int, worth: float) -> float:
    return length * (worth + length)
