"""Micro-batches: token rows as the tensors that the loss reads.

One micro-batch holds N rows, right-padded to T + 1 tokens, under TRL's names: the "completion" is the whole row after
its first token. Later it gets the weight of each token in the loss of the step: 0 for context, and for a trained token
the weight that the objective's mean gives it, so that all terms of the loss (policy, KL, entropy) have the same mean.
The micro-batch also holds the model's input and the positions in its output that predict the K trained tokens.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from ratchet.trainer.learner.shared_prefixes import PrefixTree, pack_rows, prefix_tree
from ratchet.trainer.rows.token_row import TokenRow, split_by_budget
from ratchet.trainer.settings.objectives import Objective

Micro = dict[str, torch.Tensor]

# GPU attention kernels copy masks whose rows are not aligned to this.
_ALIGNED = 8


def collate(
    packs: Sequence[Sequence[TokenRow]], pad_id: int, device: torch.device, *, padding_free: bool = False
) -> Micro:
    """Return a micro-batch of N rows in M packs.

    With `padding_free` packs of one row each are forwarded as one sequence, for attention that takes their ends.
    """
    rows = [row for pack in packs for row in pack]
    width = max(len(row.ids) for row in rows) - 1
    trained = _padded([row.mask[1:] for row in rows], width, 0)  # (N, T)
    micro = {
        "prompt_ids": torch.tensor([row.ids[:1] for row in rows]),  # (N, 1)
        "completion_ids": _padded([row.ids[1:] for row in rows], width, pad_id),  # (N, T)
        "completion_mask": _padded([(1,) * (len(row.ids) - 1) for row in rows], width, 0),  # (N, T)
        "trained": trained.bool(),  # (N, T)
        "sampling_per_token_logps": _padded([row.logprobs[1:] for row in rows], width, 0.0) * trained,  # (N, T)
        "advantages": _padded([_advantages(row) for row in rows], width, 0.0),  # (N, T)
        "importance": torch.tensor([[row.importance] for row in rows]),  # (N, 1)
        "age": torch.tensor([[math.inf if row.age is None else float(row.age)] for row in rows]),  # (N, 1)
    }
    trees = [prefix_tree([row.ids for row in pack]) for pack in packs]
    if padding_free and all(len(tree.paths) == 1 for tree in trees):
        micro |= _end_to_end(trees)
        starts = micro["cu_seq_lens"].tolist()[:-1]
    else:
        micro |= _forwarded(trees, pad_id)
        size = micro["forwarded_ids"].shape[1]
        starts = range(0, len(trees) * size, size)
    micro |= _trained_positions(micro, trees, starts, rows)
    return {name: tensor.to(device) for name, tensor in micro.items()}


def _forwarded(trees: Sequence[PrefixTree], pad_id: int) -> Micro:
    """Return the model's input, (M, L) each: one row per pack, or trees with the data of their attention masks."""
    max_length = max(len(tree.ids) for tree in trees)
    if all(len(tree.paths) == 1 for tree in trees):
        attended = _padded([(1,) * len(tree.ids) for tree in trees], max_length, 0)
        return {"forwarded_ids": _padded([tree.ids for tree in trees], max_length, pad_id), "attended": attended}
    width = -(-max_length // _ALIGNED) * _ALIGNED
    itself = range(1, width + 1)  # padding attends to itself only
    return {
        "forwarded_ids": _padded([tree.ids for tree in trees], width, pad_id),
        "positions": _padded([tree.positions for tree in trees], width, 0),
        "until": torch.tensor([[*tree.until, *itself[len(tree.ids) :]] for tree in trees]),
    }


def _end_to_end(trees: Sequence[PrefixTree]) -> Micro:
    """Return rows end to end as the model's input: ids and positions (1, L), and where they begin and end, (M + 1,)."""
    lengths = [len(tree.ids) for tree in trees]
    return {
        "forwarded_ids": torch.tensor([[token for tree in trees for token in tree.ids]]),
        "positions": torch.tensor([[place for length in lengths for place in range(length)]]),
        "cu_seq_lens": torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
        "max_length": torch.tensor(max(lengths)),
    }


def _trained_positions(
    micro: Micro, trees: Sequence[PrefixTree], starts: Sequence[int], rows: Sequence[TokenRow]
) -> Micro:
    """Return for the K trained tokens, (K,) each: predicting place in the forwarded tokens, id, sampling temperature.

    With `truncation` (K, 3) if there is any. `starts` are the places of the packs' first tokens.
    """
    trained = micro["trained"]  # (N, T)
    before = [
        [start + place for place in path[:-1]] for start, tree in zip(starts, trees, strict=True) for path in tree.paths
    ]
    of_row = trained.nonzero(as_tuple=True)[0]  # (K,)
    found = {
        "predicting": _padded(before, trained.shape[1], 0)[trained],
        "targets": micro["completion_ids"][trained],
        "temperatures": torch.tensor([row.temperature for row in rows])[of_row],
    }
    if any(row.truncation for row in rows):
        found["truncation"] = torch.tensor([row.truncation or (0, 1.0, 0.0) for row in rows])[of_row]
    return found


def split(
    rows: Sequence[TokenRow], token_budget: int, *, pairs_per_token: float | None = None, rank: int = 0, ranks: int = 1
) -> list[list[list[TokenRow]]]:
    """Return the packs of this rank's micro-batches. Every rank has the same number; some may be empty.

    A pack is one row or, with `pairs_per_token` (trainer/learner/shared_prefixes.py), several with a common prefix. A
    rank replaces an empty micro-batch with `empty_micro_batch`, because the others wait for its part of the gradient.
    """
    batches = [
        [[rows[index] for index in pack] for pack in batch] for batch in batched(rows, token_budget, pairs_per_token)
    ]
    return [
        batches[place] if place < len(batches) else []
        for place in range(rank, -(-len(batches) // ranks) * ranks, ranks)
    ]


def batched(rows: Sequence[TokenRow], token_budget: int, pairs_per_token: float | None) -> list[list[list[int]]]:
    """Return row indices by pack and micro-batch; packs of one row and of several are in different micro-batches."""
    ids = [row.ids for row in rows]
    packs = (
        [[index] for index in range(len(ids))]
        if pairs_per_token is None
        else pack_rows(ids, max_length=token_budget, pairs_per_token=pairs_per_token)
    )
    batches: list[list[list[int]]] = []
    for kind in ([pack for pack in packs if len(pack) == 1], [pack for pack in packs if len(pack) > 1]):
        lengths = [len(prefix_tree([ids[index] for index in pack]).ids) for pack in kind]
        batches += [[kind[place] for place in batch] for batch in split_by_budget(lengths, token_budget)]
    return batches


def empty_micro_batch(row: TokenRow, pad_id: int, device: torch.device) -> Micro:
    """Return a micro-batch of one row without trained tokens, for a rank without rows of its own."""
    micro = collate([[row]], pad_id, device)
    nothing = {
        name: micro[name][:0] for name in ("predicting", "targets", "temperatures", "truncation") if name in micro
    }
    return micro | nothing | {name: torch.zeros_like(micro[name]) for name in ("trained", "advantages")}


def token_weights(
    micro: Micro, objective: Objective, length: int, kept: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weight of each token in the loss, (N, T), and the number of units that the mean divides by, ()."""
    trained = micro["trained"] & kept  # (N, T)
    if objective.mean == "tokens":
        return trained.float(), trained.sum()
    if objective.mean == "trajectories":  # of one whose rows are rejected in part, the rest counts by its tokens
        weights = trained / micro["trajectory_tokens"]
        return weights, weights.sum()
    n_row = trained.sum(-1, keepdim=True).clamp(min=1)  # (N, 1)
    divisor: Any = n_row if objective.mean == "rows" else length
    return trained / divisor, trained.any(-1).sum()


def _padded(rows: Sequence[Sequence[Any]], width: int, fill: float) -> torch.Tensor:
    padded = [[*row, *[fill] * (width - len(row))] for row in rows]
    return torch.tensor(padded, dtype=torch.float32 if isinstance(fill, float) else torch.long)


def _advantages(row: TokenRow) -> Sequence[float]:
    return row.advantages[1:] if row.advantages is not None else (row.advantage,) * (len(row.ids) - 1)
