"""A comparison of models in the project, for `evaluate` and `select_model`."""

from __future__ import annotations

from ratchet.api.arguments import Arguments
from ratchet.api.runs import TuningRun, start
from ratchet.tuning.caller import RunCaller
from ratchet.tuning.compare_models import ComparisonOptions, compare
from ratchet.tuning.proxy_services import proxy_services


async def start_comparison(given: Arguments, wanted: ComparisonOptions) -> TuningRun:
    """Start or resume a comparison, with services for it if none run; return when it has an id."""

    def work(caller: RunCaller) -> None:
        with proxy_services(given.settings, caller):
            compare(given.settings, wanted, caller)

    return await start(given, wanted.kind, wanted.resume, work)
