"""The section `adapters`: where the versions are kept, and how many replicas must serve a version."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, field_validator

_URL = re.compile(r"(?P<protocol>[a-z][a-z0-9+.-]*)://(?P<place>[^/]*)")


class AdapterSettings(BaseModel):
    """Where the adapters and the learner's states are kept."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    store: str | None = Field(
        None,
        description="folder, `s3://bucket/prefix` or `gs://bucket/prefix` of the versions; null: the state folder "
        "([storage.md](storage.md))",
    )
    quorum: int | None = Field(
        None, ge=1, description="replicas that must serve a new version; null: all of one or two, else all but one"
    )
    max_cache_gb: float = Field(
        20.0, gt=0, description="size of the local copies of versions in object storage, GB; more than vLLM has loaded"
    )

    @field_validator("store")
    @classmethod
    def _place(cls, store: str | None) -> str | None:
        if not store:
            return None
        url = _URL.match(store)
        if url is None:
            return str(Path(store).expanduser().absolute())
        if url["protocol"] == "file":
            return str(Path(store.removeprefix("file://")).absolute())
        if "@" in url["place"]:
            raise ValueError("the URL holds credentials: give them by variable, such as AWS_ACCESS_KEY_ID")
        if not url["place"]:
            raise ValueError(f"{store} names no bucket; write it like s3://bucket/prefix")
        return store.rstrip("/")

    @property
    def max_cache_bytes(self) -> int:
        """The size of the local copies in bytes."""
        return int(self.max_cache_gb * 1e9)

    @property
    def is_remote(self) -> bool:
        """Whether the store is object storage."""
        return self.store is not None and "://" in self.store
