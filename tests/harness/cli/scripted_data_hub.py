"""A server with the Hugging Face hub's API for data sets: metadata, file lists, files."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

_COMMIT = hashlib.sha1(b"one").hexdigest()


@contextmanager
def hub_with(name: str, files: Mapping[str, bytes]) -> Iterator[str]:
    """Serve one data set; the value is the hub's URL."""

    class DatasetHandler(BaseHTTPRequestHandler):
        """Serves one data set."""

        def do_GET(self) -> None:
            self._answer()

        def do_HEAD(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or b"{}")
            self._json([_entry(path, files[path]) for path in body.get("paths", ()) if path in files])

        def _answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            file = path.removeprefix(f"/datasets/{name}/resolve/").partition("/")[2]
            if path.startswith(f"/datasets/{name}/resolve/") and file in files:
                self._bytes(files[file])
            elif path.startswith(f"/api/datasets/{name}/tree/"):
                self._json([_entry(*one) for one in files.items()])
            elif path == f"/api/datasets/{name}" or path.startswith(f"/api/datasets/{name}/revision/"):
                siblings = [{"rfilename": one} for one in files]
                self._json({"id": name, "sha": _COMMIT, "siblings": siblings, "private": False, "tags": []})
            elif path == "/":
                self._json({})
            else:
                self._json({"error": "not found"}, 404)

        def _json(self, content: Any, status: int = 200) -> None:
            self._bytes(json.dumps(content).encode(), status, "application/json")

        def _bytes(self, content: bytes, status: int = 200, kind: str = "application/octet-stream") -> None:
            first, last = 0, len(content) - 1
            if (request := self.headers.get("range")) and status == 200:
                begin, _, end = request.removeprefix("bytes=").partition("-")
                status, first, last = 206, int(begin or 0), min(last, int(end or last))
            part = content[first : last + 1]
            self.send_response(status)
            if status == 404:
                self.send_header("x-error-code", "EntryNotFound" if name in self.path else "RepoNotFound")
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(part)))
            self.send_header("etag", f'"{hashlib.sha1(content).hexdigest()}"')
            self.send_header("x-repo-commit", _COMMIT)
            self.send_header("accept-ranges", "bytes")
            if status == 206:
                self.send_header("content-range", f"bytes {first}-{last}/{len(content)}")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(part)

        def log_message(self, format: str, *args: object) -> None:
            """Stay quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), DatasetHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def _entry(path: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
