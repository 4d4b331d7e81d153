"""A connection of the OpenAI SDK for one rollout, cheap enough to make one for each.

Every rollout of a workflow has a base URL of its own. Reading the machine's certificates, which the SDK does for every
client, takes longer than all of an attempt's own work: it is done once here.
"""

from __future__ import annotations

import ssl
from functools import cache

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

TIMEOUT_SECONDS = 120.0


def connection(base_url: str, api_key: str) -> AsyncOpenAI:
    """A client of its own; close it, or use it as a context manager."""
    web = DefaultAsyncHttpxClient(verify=_certificates())
    return AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=TIMEOUT_SECONDS, http_client=web)


@cache
def _certificates() -> ssl.SSLContext:
    return ssl.create_default_context()
