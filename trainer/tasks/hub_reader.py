"""Rows of a data set on the Hugging Face hub, streamed with `datasets`. HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE apply.

A name is `owner/name`, or `owner/name:configuration`. Without a network, the error comes within seconds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from ratchet.store.install_hint import install_hint
from ratchet.trainer.errors import TaskSetError, TaskSetNotFound, TuningError
from ratchet.trainer.tasks.file_reader import Numbered, checked

_TIMEOUT = 5.0  # seconds


class HubSet:
    """A data set of the hub, or a folder in the hub's own layout."""

    def __init__(self, name: str, *, local: bool = False, environ: Mapping[str, str] = os.environ) -> None:
        self._path, _, configuration = (name, "", "") if local else name.partition(":")
        self._configuration = configuration or None
        self._environ = environ
        self._local = local

    def splits(self) -> tuple[str, ...]:
        """Return the names of its splits. Raises TaskSetNotFound."""
        datasets = self._library()
        try:
            return tuple(datasets.get_dataset_split_names(self._path, self._configuration))
        except Exception as error:  # the library raises whatever its readers and its network raise
            raise self._not_found(error) from error

    def rows(self, split: str) -> Iterator[Numbered]:
        """Yield (number, row) of a split. Raises TaskSetError."""
        datasets = self._library()
        try:
            rows = iter(datasets.load_dataset(self._path, self._configuration, split=split, streaming=True))
        except Exception as error:  # as above
            raise self._not_found(error) from error
        number = 0
        while True:
            number += 1
            try:
                row: Any = next(rows, None)
            except Exception as error:  # as above
                raise TaskSetError(f"{self._path}, split {split}, row {number}: {_sentence(error)}") from error
            if row is None:
                return
            yield number, checked(row, f"{self._path}, split {split}, row {number}")

    def _library(self) -> Any:
        try:
            if not self._local:
                self._reach()
            import datasets
        except ImportError as error:
            raise TuningError(
                f"{self._path}: reading data sets of the hub needs datasets: {install_hint('trainer')}"
            ) from error
        return datasets

    def _reach(self) -> None:
        """Check that the hub answers; the library would retry for minutes."""
        import httpx
        from huggingface_hub import constants

        if self._environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
            return  # only the cache is read
        hub = self._environ.get("HF_ENDPOINT") or constants.ENDPOINT
        try:
            httpx.head(hub, timeout=_TIMEOUT)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise TaskSetNotFound(
                f"{self._path} is not a path here, and the hub at {hub} cannot be reached ({_sentence(error)}); "
                "give a local path, set HF_ENDPOINT to a mirror, or HF_HUB_OFFLINE=1 to read what is cached"
            ) from error

    def _not_found(self, error: Exception) -> TaskSetNotFound:
        return TaskSetNotFound(
            f"{self._path}: `datasets` cannot load it: {_sentence(error)}; give a file (.jsonl .json .csv .parquet "
            ".txt), a folder with train.jsonl and test.jsonl, or a hub name such as owner/name or owner/name:config"
        )


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
