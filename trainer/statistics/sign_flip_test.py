"""The sign-flip test of paired differences, by scipy, and Holm's correction, which scipy does not have.

The test flips the signs of the differences (Fisher 1935). It is exact if they are symmetric under the null hypothesis,
and asymptotically right otherwise (Romano 1990, JASA 85). Fewer than six tasks that differ cannot be significant at the
5% level.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from ratchet.store.install_hint import install_hint
from ratchet.trainer.errors import TuningError

_RESAMPLES = 9_999  # up to 13 differences, scipy tries all sign patterns instead
_BATCH_VALUES = 2_000_000  # values in memory at once, 16 MB
_SEED = 0  # equal differences give equal p-values


def check_scipy() -> None:
    """Raise TuningError if scipy is not installed: before a run spends rollouts that it could not compare."""
    if find_spec("scipy") is None:
        raise TuningError(f"comparing candidates needs scipy: {install_hint('trainer')}")


def sign_flip_p(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of the hypothesis that the mean difference is zero.

    Raises TuningError if scipy is not installed.
    """
    nonzero = [difference for difference in differences if difference]
    if len(nonzero) < 2:
        return 1.0  # either sign is as extreme; scipy refuses a sample of one
    check_scipy()
    import numpy
    from scipy.stats import permutation_test

    result = permutation_test(
        (numpy.array(nonzero),),
        numpy.sum,
        permutation_type="samples",
        vectorized=True,
        n_resamples=_RESAMPLES,
        batch=max(1, _BATCH_VALUES // len(nonzero)),
        rng=numpy.random.default_rng(_SEED),
    )
    return float(result.pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for multiple tests (Holm 1979, Scandinavian Journal of Statistics 6), in order."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    corrected = [1.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, p_values[index] * (len(p_values) - rank)))
        corrected[index] = highest
    return corrected
