"""Measure a served version: compare logprobs of vLLM replicas with the trainer's, for `proof.py`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ratchet.trainer.adapters.adapter_store import amplified
from ratchet.trainer.adapters.replica_fleet import ask_all
from ratchet.trainer.adapters.vllm_api import VllmServer
from ratchet.trainer.errors import CheckpointError, TrainerError
from ratchet.trainer.learner_api.protocol import LogprobScorer
from ratchet.trainer.release.proof import (
    COPIES,
    AmplifiedCopy,
    Proof,
    ProofOutcome,
    VersionLogprobs,
    better_factor,
    prove,
    rounding_of,
    size_of,
)
from ratchet.trainer.rows.token_row import scored_row

log = logging.getLogger(__name__)

_TOKENS = 3  # most likely next tokens that are compared after each probe
_REQUESTED_TOKENS = 20  # of every version, so that those are among them; vLLM returns no more by default
_FACTORS = 3  # that are tried for an amplified copy

Probes = Sequence[Sequence[int]]  # sequences of token ids


class ProofFailed(TrainerError):
    """No replica serves the candidate as the trainer made it, or it is unproven; `proofs` are those made so far."""

    def __init__(self, reason: str, outcome: ProofOutcome, proofs: dict[str, Proof]) -> None:
        super().__init__(reason)
        self.outcome = outcome
        self.proofs = proofs


@dataclass(frozen=True, slots=True)
class ServedLogprobs:
    """What one replica answers for T tokens: `places` are the numbers of their probes, `sequences` end with them."""

    places: tuple[int, ...]
    sequences: tuple[tuple[int, ...], ...]
    new: tuple[float | None, ...]
    old: Mapping[str, tuple[float | None, ...]]  # by the served name of an older version


class TrainerLogprobs:
    """The trainer's logprobs of a version, True or its reference, and of older ones. Nothing is computed twice: the
    replicas are mostly compared about the same tokens.
    """

    def __init__(self, scorer: LogprobScorer, version: bool | str = True) -> None:
        self._scorer = scorer
        self.version = version
        self._known: dict[bool | str, dict[tuple[int, ...], float]] = {}

    def score(self, sequences: Sequence[tuple[int, ...]], adapter: bool | str) -> list[float]:
        """Return the logprob of the last token of each sequence."""
        known = self._known.setdefault(adapter, {})
        missing = list(dict.fromkeys(sequence for sequence in sequences if sequence not in known))
        if missing:
            scored = self._scorer.score([scored_row(sequence) for sequence in missing], adapter=adapter)
            known |= {sequence: logprobs[-1] for sequence, logprobs in zip(missing, scored, strict=True)}
        return [known[sequence] for sequence in sequences]


@dataclass(frozen=True, slots=True)
class SwapProver:
    """Proves one version. `old` maps the served name of each older one to its reference, None for the base model,
    which must be among them.
    """

    name: str  # served
    reference: str
    old: Mapping[str, str | None]
    probes: Probes
    trainer: TrainerLogprobs
    tolerance: float

    def measure(self, replica: VllmServer) -> ServedLogprobs:
        """Ask a replica for the next-token logprobs after each probe. Raises EngineUnreachable, AdapterRefused."""
        new, *old = (replica.next_logprobs(name, self.probes, _REQUESTED_TOKENS) for name in (self.name, *self.old))
        compared = [
            (place, token)
            for place, likeliest in enumerate(new)
            for token in _common_tokens(likeliest, [logprobs[place] for logprobs in old])
        ]
        return ServedLogprobs(
            tuple(place for place, _ in compared),
            tuple((*self.probes[place], token) for place, token in compared),
            _picked(new, compared),
            {name: _picked(logprobs, compared) for name, logprobs in zip(self.old, old, strict=True)},
        )

    def prove(self, replicas: Sequence[VllmServer], served: Mapping[str, ServedLogprobs]) -> dict[str, Proof]:
        """Compare what replicas have answered, by URL, with the trainer. Where the version's own change is lost in
        rounding, an amplified copy is loaded, measured and unloaded; if that proves nothing, a larger one.
        """
        proofs = {url: self._compare(answer) for url, answer in served.items()}
        undecided = {url for url, proof in proofs.items() if proof.outcome is ProofOutcome.UNPROVEN}
        if not any(served[url].places for url in undecided):
            return proofs
        try:
            factor = self._choose_factor(next(served[url] for url in undecided if served[url].places))
            for larger in COPIES:
                compared = [replica for replica in replicas if replica.url in undecided]
                copies = self._measure_copies(factor * larger, compared, served) if compared else {}
                proofs |= {url: self._compare(served[url], copy) for url, copy in copies.items()}
                undecided = {url for url in copies if not proofs[url].holds}
        except CheckpointError as error:
            log.warning("event=no_amplified_copy policy=%s reason=%r", self.name, str(error))
        return proofs

    def _compare(self, served: ServedLogprobs, amplified: AmplifiedCopy | None = None) -> Proof:
        score = partial(self.trainer.score, served.sequences)
        return prove(
            served.places,
            VersionLogprobs(served.new, score(self.trainer.version)),
            {
                name: VersionLogprobs(served.old[name], score(reference or False))
                for name, reference in self.old.items()
            },
            tolerance=self.tolerance,
            amplified=amplified,
        )

    @property
    def _base(self) -> str:
        return next(name for name, reference in self.old.items() if reference is None)

    def _measure_copies(
        self, factor: float, replicas: Sequence[VllmServer], served: Mapping[str, ServedLogprobs]
    ) -> dict[str, AmplifiedCopy]:
        """Return what each replica answers under an amplified copy; one that cannot load it is left out."""
        name = f"{self.name}x{factor:g}"  # no proxy knows this name
        with amplified(self.reference, factor) as copy:

            def measure(replica: VllmServer) -> Sequence[Mapping[int, float]]:
                try:
                    replica.load(name, copy)
                    return replica.next_logprobs(name, self.probes, _REQUESTED_TOKENS)
                finally:
                    replica.unload(name)

            answers, errors = ask_all(replicas, measure, len(replicas))
            for url, error in errors.items():
                log.warning("event=no_amplified_copy policy=%s replica=%s reason=%r", self.name, url, str(error))
            return {
                url: AmplifiedCopy(
                    factor,
                    VersionLogprobs(
                        _picked(answer, [(p, s[-1]) for p, s in zip(found.places, found.sequences, strict=True)]),
                        self.trainer.score(found.sequences, copy),
                    ),
                    self._base,
                )
                for url, answer in answers.items()
                for found in (served[url],)
            }

    def _choose_factor(self, served: ServedLogprobs) -> float:
        """Return the factor with which the trainer's logprobs change by a size that no rounding hides."""
        trained = self.trainer.score(served.sequences, False)
        rounding = rounding_of(VersionLogprobs(served.old[self._base], trained))

        def change(adapter: bool | str) -> float:
            scored = self.trainer.score(served.sequences, adapter)
            return size_of([new - old for new, old in zip(scored, trained, strict=True)])

        factor = better_factor(change(self.trainer.version), rounding)
        for _ in range(_FACTORS):
            with amplified(self.reference, factor) as copy:
                better = better_factor(change(copy), rounding, factor)
            if better == factor:
                break
            factor = better
        return factor


def _picked(answer: Sequence[Mapping[int, float]], compared: Sequence[tuple[int, int]]) -> tuple[float | None, ...]:
    return tuple(answer[place].get(token) for place, token in compared)


def _common_tokens(likeliest: Mapping[int, float], others: Sequence[Mapping[int, float]]) -> list[int]:
    """Return the most likely tokens, those first whose logprob every version returned."""
    known = sorted(likeliest, key=lambda token: (sum(token not in other for other in others), -likeliest[token]))
    return known[:_TOKENS]
