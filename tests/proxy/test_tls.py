"""HTTPS: the certificate's files, their renewal, wrong files, and Ratchet's own clients."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from pydantic import ValidationError

from ratchet.proxy.errors import ProxyError
from ratchet.proxy.server import serve
from ratchet.proxy.settings import ProxySettings
from ratchet.trainer.adapters.vllm_api import list_models
from tests.harness.proxy.servers import ProxyProcess, eventually


class Authority:
    """A certificate authority, with one pair for the proxy in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._ca = trustme.CA()
        self.ca_file, self.certificate, self.key = (folder / name for name in ("ca.pem", "tls.crt", "tls.key"))
        self._ca.cert_pem.write_to_path(self.ca_file)
        self.issue()

    def issue(self) -> None:
        """Write another pair: the key first, so that the files do not belong together for a moment."""
        issued = self._ca.issue_cert("127.0.0.1", "localhost")
        issued.private_key_pem.write_to_path(self.key)
        issued.cert_chain_pems[0].write_to_path(self.certificate)

    @property
    def context(self) -> ssl.SSLContext:
        """What a client trusts."""
        return ssl.create_default_context(cafile=self.ca_file)

    def serial_at(self, url: str) -> str:
        """The serial number of the certificate that a server shows."""
        parts = httpx.URL(url)
        with (
            socket.create_connection((parts.host, parts.port), timeout=20) as plain,
            self.context.wrap_socket(plain, server_hostname=parts.host) as secure,
        ):
            shown: Any = secure.getpeercert()
            return str(shown["serialNumber"])


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def proxy(authority: Authority, vllm_url: str, tmp_path: Path) -> Iterator[ProxyProcess]:
    files = {"tls_certificate": str(authority.certificate), "tls_key": str(authority.key)}
    started = ProxyProcess(tmp_path, upstreams=[vllm_url], **files)
    with contextlib.ExitStack() as stack:
        stack.callback(started.stop)
        yield started


@pytest.mark.slow
def test_calls_and_streams_are_served_over_https_and_a_renewed_certificate_without_a_restart(
    proxy: ProxyProcess, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert proxy.url.startswith("https://127.0.0.1:")
    body: Any = {"model": "agent", "messages": [{"role": "user", "content": "hi"}]}
    with httpx.Client(base_url=proxy.url, verify=authority.context, timeout=60) as http:
        eventually(lambda: http.get("/health/ready").status_code == 200)
        assert http.post("/v1/chat/completions", json=body).status_code == 200
        streamed = http.post("/v1/chat/completions", json={**body, "stream": True})
        assert streamed.text.rstrip().endswith("data: [DONE]")
        first = authority.serial_at(proxy.url)
        authority.issue()
        eventually(lambda: authority.serial_at(proxy.url) != first)
        second = authority.serial_at(proxy.url)
        authority.key.write_text("not a key")
        log = tmp_path / "proxy.log"
        eventually(lambda: "event=certificate_not_reloaded" in log.read_text())
        assert authority.serial_at(proxy.url) == second
        assert http.get("/health/live").status_code == 200
    with pytest.raises(httpx.RemoteProtocolError):  # HTTP on a port of HTTPS
        httpx.get(proxy.url.replace("https", "http") + "/health/live", timeout=60)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.ca_file))
    assert "agent" in {card["id"] for card in list_models(proxy.url)}


def settings(folder: Path, **given: Any) -> ProxySettings:
    values = {"upstreams": ("http://127.0.0.1:9",), "model": "agent", "store": str(folder / "s.db"), "port": 0}
    return ProxySettings(**values, journal=folder / "journal", **given)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda pair: pair.certificate.unlink(), r"tls_certificate .*tls\.crt .*No such file"),
        (lambda pair: pair.key.unlink(), r"tls_key .*tls\.key .*No such file"),
        (lambda pair: pair.key.write_text("no key"), "are not a PEM certificate and key"),
        (lambda pair: shutil.copy(_other_key(pair), pair.key), r"tls\.key .* tls_certificate"),
        (lambda pair: pair.key.write_bytes(_encrypted(pair)), "encrypted: .* without a password"),
    ],
    ids=["no certificate", "no key", "no pem", "mismatch", "encrypted"],
)
def test_a_pair_that_cannot_be_used_is_refused_with_its_file(
    authority: Authority, tmp_path: Path, change: Any, reason: str
) -> None:
    change(authority)
    with pytest.raises(ProxyError, match=reason):
        serve(settings(tmp_path, tls_certificate=authority.certificate, tls_key=authority.key))


def test_a_key_without_a_certificate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="tls_key is set without tls_certificate"):
        settings(tmp_path, tls_key=tmp_path / "tls.key")


def _other_key(pair: Authority) -> Path:
    other = pair.key.with_name("other")
    other.mkdir()
    return Authority(other).key


def _encrypted(pair: Authority) -> bytes:
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(pair.key.read_bytes(), None)
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
