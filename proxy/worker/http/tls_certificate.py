"""The certificate that the proxy serves HTTPS with, read again when its files change.

Promises: a pair that cannot be used at the start is a ProxyError that names the setting and the remedy; one that cannot
be used later is logged once, and the last good pair stays in force. New connections get the new certificate, open ones
are left alone. An encrypted key is refused: nobody is asked for a password.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path
from typing import NoReturn

from ratchet.proxy.errors import ProxyError

log = logging.getLogger("ratchet.proxy")

_LOOK_SECONDS = 1.0  # between two looks at the files


class TlsCertificate:
    """The pair of `tls_certificate` and `tls_key`; without a key file, the certificate's file holds both."""

    def __init__(self, certificate: Path, key: Path | None) -> None:
        """Read the pair. Raises ProxyError."""
        self._certificate = certificate
        self._key = key
        self._seen = self._state_of_files()
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.context.set_alpn_protocols(["http/1.1"])
        problem = self._load()
        if problem is not None:
            raise ProxyError(problem)

    async def watch(self) -> None:
        """Read the pair again whenever a file changes, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            seen = self._state_of_files()
            if seen == self._seen:
                continue
            self._seen = seen
            problem = self._load()
            if problem is None:
                log.info("event=certificate_reloaded file=%s", self._certificate)
            else:
                log.error("event=certificate_not_reloaded reason=%r", f"{problem}; the last one stays in force")

    def _load(self) -> str | None:
        """Read the pair into the context; return why it cannot be used."""
        try:
            # A pair that fails would leave its certificate in the context: try it in another one first.
            for context in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self.context):
                context.load_cert_chain(self._certificate, self._key, password=_refuse_password)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            return self._problem(error)
        return None

    def _problem(self, error: Exception) -> str:
        """Return the sentence for a pair that cannot be used."""
        for setting, file in (("tls_certificate", self._certificate), ("tls_key", self._key)):
            try:
                if file is not None:
                    file.read_bytes()
            except OSError as unreadable:
                return f"{setting} {file} cannot be read: {unreadable.strerror}; name a file that this user may read"
        if getattr(error, "reason", "") == "KEY_VALUES_MISMATCH":
            return f"tls_key {self._key or self._certificate} is not the key of tls_certificate {self._certificate}"
        if isinstance(error, ValueError):
            return f"tls_key {self._key or self._certificate} is encrypted: give a key without a password"
        return (
            f"tls_certificate {self._certificate} and its key {self._key or 'in the same file'} are not a PEM "
            f"certificate and key: {getattr(error, 'reason', None) or error}"
        )

    def _state_of_files(self) -> list[tuple[int, int, int] | None]:
        """Return what changes with the files; links are followed, as Kubernetes replaces them."""
        return [_state_of(file) for file in (self._certificate, self._key) if file is not None]


def _state_of(file: Path) -> tuple[int, int, int] | None:
    try:
        state = file.stat()
    except OSError:
        return None
    return state.st_mtime_ns, state.st_ino, state.st_size


def _refuse_password() -> NoReturn:
    raise ValueError("the key is encrypted")
