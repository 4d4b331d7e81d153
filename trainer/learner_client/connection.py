"""HTTP connections to one learner service. Errors of the network and of the service become TrainerError here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import msgspec

from ratchet.trainer import errors
from ratchet.trainer.errors import LearnerRefused, LearnerServiceError, LearnerUnreachable, TrainerError
from ratchet.trainer.learner_api.messages import (
    MSGPACK,
    SILENCE_SECONDS,
    Answer,
    Frame,
    LearnerStatus,
    Refusal,
    encode,
    read_frames,
)

_CONNECT_SECONDS = 10.0
_WRITE_SECONDS = 120.0
_STATUS_SECONDS = 30.0


class LearnerConnection:
    """The service at a URL. Several threads may use it. `check` is called before each operation, and may refuse it."""

    def __init__(self, url: str, token: str | None = None, check: Callable[[], None] = lambda: None) -> None:
        self.url = url.rstrip("/")
        self._check = check
        headers = {"authorization": f"Bearer {token}"} if token else {}
        timeout = httpx.Timeout(SILENCE_SECONDS, connect=_CONNECT_SECONDS, write=_WRITE_SECONDS)
        try:
            self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout, trust_env=False)
        except httpx.InvalidURL as error:
            raise LearnerRefused(f"learner.url {url} is not a URL: {error}") from error

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def status(self) -> LearnerStatus:
        """Return the learner's status. Raises LearnerUnreachable, LearnerRefused."""
        try:
            response = self._http.get("/v1/status", timeout=_STATUS_SECONDS)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from error
        if response.is_error:
            raise self._refusal(response.status_code, response.content)
        try:
            return msgspec.json.decode(response.content, type=LearnerStatus)
        except msgspec.MsgspecError as error:
            raise LearnerRefused(f"learner.url {self.url} is not this version's learner service: {error}") from error

    def post(self, path: str, message: Any, on_frame: Callable[[Frame], None] = lambda frame: None) -> Answer:
        """Run an operation to its end; `on_frame` gets what is answered before. Never sends a request twice.

        Raises the TrainerError of the operation, LearnerUnreachable or LearnerRefused.
        """
        answer = self.exchange(path, message, on_frame)
        if answer.error is not None:
            raise made_error(answer.error, answer.message)
        return answer

    def exchange(self, path: str, message: Any, on_frame: Callable[[Frame], None] = lambda frame: None) -> Answer:
        """Run an operation to its end, as `post` does; return its answer also if it failed."""
        self._check()
        try:
            with self._http.stream(
                "POST", path, content=encode(message), headers={"content-type": MSGPACK}
            ) as response:
                if response.is_error:
                    raise self._refusal(response.status_code, response.read())
                if response.headers.get("content-type") != MSGPACK:
                    raise ValueError("its answer is of another type")
                for frame in read_frames(response.iter_bytes()):
                    if isinstance(frame, Answer):
                        return frame
                    on_frame(frame)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from error
        except (ValueError, msgspec.MsgspecError) as error:
            raise LearnerRefused(f"learner.url {self.url} is not a learner service: {error}") from error
        raise LearnerUnreachable(f"the learner at {self.url} ended before it answered; its log says why")

    def _unreachable(self, error: Exception) -> LearnerUnreachable:
        return LearnerUnreachable(
            f"learner.url {self.url} does not answer ({error or type(error).__name__}): start `ratchet learner` there, "
            "or set the address of a running one"
        )

    def _refusal(self, status: int, body: bytes) -> TrainerError:
        try:
            refusal = msgspec.json.decode(body, type=Refusal)
        except msgspec.MsgspecError:
            return LearnerRefused(f"learner.url {self.url} is not a learner service: it answered with status {status}")
        return made_error(refusal.error, f"the learner at {self.url} refuses: {refusal.message}")


def made_error(name: str, message: str) -> TrainerError:
    """Return the error of a class of trainer/errors.py; a LearnerServiceError if there is no such class."""
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, TrainerError):
        return kind(message)
    return LearnerServiceError(f"{name}: {message}")
