"""Which errors of a judge's endpoint are outages: trajectories wait for them, and no attempt of the judge is counted.

An outage is no connection, a refused credential (401, 403), a limit (429) and a gateway or server that takes no request
(502, 503, 504). Everything else may be caused by what was asked, and would come back: it is an attempt. That includes
500, 400 and a time-out while the endpoint answers.
"""

from __future__ import annotations

from collections.abc import Callable

from ratchet.trainer.controller.judges.opinion import DraftVerdict
from ratchet.trainer.errors import JudgeAway

_UNREACHED = ("ConnectError", "ConnectTimeout", "ProxyError")  # by name: `openai` brings a copy of httpx
_REFUSED = (401, 403)
_LIMITED = 429
_AWAY = (502, 503, 504)


def ask_unless_away(away: str | None, ask: Callable[[], DraftVerdict]) -> tuple[DraftVerdict, str | None]:
    """Return the draft verdict of `ask`, and why the endpoint is away; if it was `away` before, it is not asked."""
    if away is None:
        try:
            return ask(), None
        except JudgeAway as error:
            away = str(error)
    return DraftVerdict.failed(away), away


def is_unreached(error: BaseException | None) -> bool:
    """Return whether an error of httpx says that no connection was made, so that nothing was sent."""
    return type(error).__name__ in _UNREACHED


def remedy_of(status: int | None, credential: str, address: str) -> str | None:
    """Return the remedy of an outage; None for other errors.

    status      of the response; None: no connection
    credential  what to do if it is refused
    address     the setting that names the endpoint
    """
    if status in _REFUSED:
        return credential
    if status == _LIMITED:
        return "a limit of the endpoint is reached: raise it there, or lower the judge's `concurrency`"
    if status is None or status in _AWAY:
        return f"see that the endpoint is up and `{address}` is right"
    return None
