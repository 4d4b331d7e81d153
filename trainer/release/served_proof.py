"""Measure a served version: compare logprobs of a vLLM replica with the trainer's, for `proof.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ratchet.trainer.adapters.vllm_api import VllmServer
from ratchet.trainer.errors import TrainerError
from ratchet.trainer.learner_protocol import LogprobScorer
from ratchet.trainer.release.proof import Proof, ProofOutcome, VersionLogprobs, prove

_TOKENS = 3  # most likely next tokens that are compared after each probe
_REQUESTED_TOKENS = 20  # of every version, so that those are among them; vLLM returns no more by default


class ProofFailed(TrainerError):
    """No replica serves the candidate as the trainer made it, or it is unproven; `proofs` are those made so far."""

    def __init__(self, reason: str, outcome: ProofOutcome, proofs: dict[str, Proof]) -> None:
        super().__init__(reason)
        self.outcome = outcome
        self.proofs = proofs


def prove_served(
    replica: VllmServer,
    name: str,
    old: Mapping[str, Path | None],
    probes: Sequence[Sequence[int]],
    scorer: LogprobScorer,
    *,
    tolerance: float,
) -> Proof:
    """Compare the next-token logprobs after each probe (ids) under `name` and under older served names.

    `old` maps each older name to its adapter folder, None for the base model. The scorer holds the new version.
    Raises EngineUnreachable, AdapterRefused.
    """
    served = replica.next_logprobs(name, probes, _REQUESTED_TOKENS)
    before = {other: replica.next_logprobs(other, probes, _REQUESTED_TOKENS) for other in old}
    compared = [
        (place, token)
        for place, likeliest in enumerate(served)
        for token in _common_tokens(likeliest, [logprobs[place] for logprobs in before.values()])
    ]
    sequences = [(*probes[place], token) for place, token in compared]

    def trained(adapter: bool | Path) -> list[float]:
        return [logprobs[-1] for logprobs in scorer.score(sequences, adapter=adapter)]

    return prove(
        [place for place, _ in compared],
        VersionLogprobs([served[place][token] for place, token in compared], trained(adapter=True)),
        {
            other: VersionLogprobs(
                [before[other][place].get(token) for place, token in compared], trained(folder or False)
            )
            for other, folder in old.items()
        },
        tolerance=tolerance,
    )


def _common_tokens(likeliest: Mapping[int, float], others: Sequence[Mapping[int, float]]) -> list[int]:
    """Return the most likely tokens, those first whose logprob every version returned."""
    known = sorted(likeliest, key=lambda token: (sum(token not in other for other in others), -likeliest[token]))
    return known[:_TOKENS]
