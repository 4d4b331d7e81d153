"""The difference between the trainer's and vLLM's logprob of every trained token of a round, by row.

Micro-batches sort, split and pack rows over the processes; a row is found again by its token ids and recorded logprobs.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

import torch

from ratchet.trainer.learner import process_group
from ratchet.trainer.learner.forward_pass import Micro
from ratchet.trainer.learner.importance_sampling import log_ratio
from ratchet.trainer.rows.token_row import TokenRow

_Gaps = dict[bytes, bytes | None]  # by the row's key


def by_row(micros: Sequence[Micro], rows: Sequence[TokenRow]) -> tuple[bytes | None, ...]:
    """Return RoundReport's `mismatch`. Collective: all processes call it, each with its own micro-batches.

    The micro-batches have been trained, so that they hold the logprobs before the round and which rows were kept.
    """
    gaps: _Gaps = {}
    for found in process_group.gather([_gaps(micro) for micro in micros]):
        for one in found:
            gaps |= one
    return tuple(gaps.get(_key(row), b"") for row in rows)


def _gaps(micro: Micro) -> _Gaps:
    """Return the differences of a micro-batch's rows: empty without `importance`, None if the row was rejected."""
    names = ("trained", "importance", "kept", "prompt_ids", "completion_ids", "completion_mask")
    on_cpu = {name: micro[name].cpu() for name in names}
    differences, sampled = log_ratio(micro).half().cpu(), micro["sampling_per_token_logps"].cpu()  # (N, T) each
    found: _Gaps = {}
    for place, trained in enumerate(on_cpu["trained"]):
        if not trained.any():
            continue
        length = int(on_cpu["completion_mask"][place].sum())
        ids = torch.cat([on_cpu["prompt_ids"][place], on_cpu["completion_ids"][place, :length]])
        key = _digest(ids.numpy().tobytes(), (sampled[place, :length] + 0.0).numpy().tobytes())  # -0.0 becomes 0.0
        if not on_cpu["kept"][place]:
            found[key] = None
        else:
            compared = bool(on_cpu["importance"][place])
            found[key] = differences[place][trained].numpy().tobytes() if compared else b""
    return found


def _key(row: TokenRow) -> bytes:
    recorded = (logprob if trained else 0.0 for logprob, trained in zip(row.logprobs[1:], row.mask[1:], strict=True))
    return _digest(array("q", row.ids).tobytes(), array("f", (one + 0.0 for one in recorded)).tobytes())


def _digest(ids: bytes, logprobs: bytes) -> bytes:
    return hashlib.blake2b(ids + logprobs, digest_size=16).digest()
