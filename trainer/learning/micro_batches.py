"""Micro-batches: token rows as the tensors that TRL's loss reads.

One micro-batch holds N rows, right-padded; T is the longest row less one, because TRL's "completion" is here the whole
row after its first token. TRL's "tool mask" carries what each token weighs in the step's loss: 0 for context, and for a
trained token what the objective's mean makes of it, so that every term of the loss (policy, KL, entropy) has the same
mean. Beside them stands what the model is run on, and where in its output the K trained tokens are predicted. Does not
run the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trainer.learning.objectives import Objective
from trainer.learning.tokens import TokenRow, split_by_budget

Micro = dict[str, torch.Tensor]


def collate(rows: Sequence[TokenRow], pad_id: int, device: torch.device) -> Micro:
    """One micro-batch of N rows, under TRL's names, in which every trained token weighs 1."""
    n_rows, width = len(rows), max(len(row.ids) for row in rows) - 1
    trained = _padded([row.mask[1:] for row in rows], width, 0)  # (N, T)
    micro = {
        "prompt_ids": torch.tensor([row.ids[:1] for row in rows]),  # (N, 1)
        "prompt_mask": torch.ones(n_rows, 1, dtype=torch.long),  # (N, 1)
        "completion_ids": _padded([row.ids[1:] for row in rows], width, pad_id),  # (N, T)
        "completion_mask": _padded([(1,) * (len(row.ids) - 1) for row in rows], width, 0),  # (N, T)
        "tool_mask": trained.float(),  # (N, T)
        "trained": trained.bool(),  # (N, T)
        "sampling_per_token_logps": _padded([row.logprobs[1:] for row in rows], width, 0.0) * trained,  # (N, T)
        "advantages": _padded([_advantages(row) for row in rows], width, 0.0),  # (N, T)
        "importance": torch.tensor([[row.importance] for row in rows]),  # (N, 1)
    }
    micro |= _forwarded(micro, torch.tensor([row.temperature for row in rows]))
    return {name: tensor.to(device) for name, tensor in micro.items()}


def _forwarded(micro: Micro, temperature: torch.Tensor) -> Micro:
    """What the model is run on, (N, 1 + T); and of the K trained tokens, (K,), where each is predicted and what is."""
    row, place = micro["trained"].nonzero(as_tuple=True)  # (K,) each
    return {
        "forwarded_ids": torch.cat([micro["prompt_ids"], micro["completion_ids"]], dim=1),  # (N, 1 + T)
        "attended": torch.cat([micro["prompt_mask"], micro["completion_mask"]], dim=1),  # (N, 1 + T)
        "predicting": row * (micro["trained"].shape[1] + 1) + place,  # of all positions, row by row
        "targets": micro["completion_ids"][row, place],
        "temperatures": temperature[row],
    }


def split(rows: Sequence[TokenRow], token_budget: int, *, rank: int = 0, ranks: int = 1) -> list[list[TokenRow]]:
    """The rows of this rank's micro-batches: every rank has as many, if need be an empty one.

    A rank with an empty one goes through the motions with `blank`: the others wait for its part of the gradient.
    """
    batches = [[rows[index] for index in batch] for batch in split_by_budget([len(r.ids) for r in rows], token_budget)]
    return [
        batches[place] if place < len(batches) else []
        for place in range(rank, -(-len(batches) // ranks) * ranks, ranks)
    ]


def blank(row: TokenRow, pad_id: int, device: torch.device) -> Micro:
    """A micro-batch of one row in which no token is trained: for a rank that has nothing to do while others have."""
    micro = collate([row], pad_id, device)
    nothing = {name: micro[name][:0] for name in ("predicting", "targets", "temperatures")}
    return micro | nothing | {name: torch.zeros_like(micro[name]) for name in ("tool_mask", "trained", "advantages")}


def weigh(micro: Micro, objective: Objective, length: int, kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What every token weighs in the loss, (N, T), and how many units the mean divides by, ()."""
    trained = micro["trained"] & kept  # (N, T)
    if objective.mean == "tokens":
        return trained.float(), trained.sum()
    n_row = trained.sum(-1, keepdim=True).clamp(min=1)  # (N, 1)
    divisor: Any = n_row if objective.mean == "rows" else length
    return trained / divisor, trained.any(-1).sum()


def _padded(rows: Sequence[Sequence[Any]], width: int, fill: float) -> torch.Tensor:
    padded = [[*row, *[fill] * (width - len(row))] for row in rows]
    return torch.tensor(padded, dtype=torch.float32 if isinstance(fill, float) else torch.long)


def _advantages(row: TokenRow) -> Sequence[float]:
    return row.advantages[1:] if row.advantages is not None else (row.advantage,) * (len(row.ids) - 1)
