"""Addresses of servers in the trainer's settings: http(s), kept without a `/v1` at their end."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from ratchet.store.access.url_credentials import plain_url

PlainUrl = Annotated[str, AfterValidator(plain_url)]
