"""As much of a model hub as huggingface_hub asks for, on loopback, with one repository."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

Answer = tuple[int, dict[str, str], bytes]


class FakeHub:
    """Serves ``files`` as repository ``hub_id``; everything that was asked is in ``log``.

    Attributes:
        refs: Branches, tags and pull requests, each with its commit.
        token: When set, what a request must carry to see the repository.
        refusal: Status and headers that every question about the repository is answered with.
        cuts: How many downloads are still to be cut in the middle.
        stalled: Accept requests and never answer.
    """

    def __init__(self, hub_id: str, files: dict[str, bytes]) -> None:
        self.hub_id = hub_id
        self.files = files
        self.commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.refs = {"main": self.commit}
        self.token: str | None = None
        self.refusal: tuple[int, dict[str, str]] | None = None
        self.cuts = 0
        self.stalled = False
        self.log: list[str] = []
        self.url = ""

    def downloads(self) -> list[str]:
        """Names of the files whose content was asked for, in order and without repeats."""
        asked = [line.split("/resolve/")[1] for line in self.log if "/resolve/" in line]
        return list(dict.fromkeys(line.split("/", 1)[1] for line in asked))

    @contextmanager
    def serving(self) -> Iterator[FakeHub]:
        """Serve on a free port of loopback."""
        handler = type("Handler", (_Handler,), {"hub": self})
        with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            self.url = f"http://127.0.0.1:{server.server_port}"
            thread = threading.Thread(target=server.serve_forever, args=(0.02,))
            thread.start()
            try:
                yield self
            finally:
                self.stalled = False
                server.shutdown()
                thread.join()

    def answer(self, path: str, token: str) -> Answer:
        """Return status, headers and body."""
        if path.startswith("/cdn/"):
            return 200, {}, self.files[path.removeprefix("/cdn/")]
        if self.refusal is not None:
            return *self.refusal, b"{}"
        if self.token is not None and token != f"Bearer {self.token}":
            return 401, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Restricted."}, b"{}"
        api = f"/api/models/{self.hub_id}"
        if path == api or path.startswith(f"{api}/revision/"):
            revision = path.removeprefix(api).removeprefix("/revision/") or "main"
            return self._with_commit(revision, self._info)
        if path.startswith(f"{api}/tree/"):
            return self._with_commit(path.removeprefix(f"{api}/tree/"), lambda _: self._tree())
        resolve = f"/{self.hub_id}/resolve/"
        if path.startswith(resolve):
            revision, name = path.removeprefix(resolve).split("/", 1)
            return self._with_commit(revision, lambda commit: self._file(commit, name))
        return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"

    def _with_commit(self, revision: str, then: Callable[[str], Answer]) -> Answer:
        revision = unquote(revision)
        commit = self.refs.get(revision, revision)
        if commit not in self.refs.values():
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        return then(commit)

    def _info(self, commit: str) -> Answer:
        siblings = [{"rfilename": name} for name in self.files]
        info = {"id": self.hub_id, "modelId": self.hub_id, "sha": commit, "siblings": siblings}
        return 200, {}, json.dumps({**info, "tags": [], "private": False}).encode()

    def _tree(self) -> Answer:
        tree = [
            {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for name, data in self.files.items()
        ]
        return 200, {}, json.dumps(tree).encode()

    def _file(self, commit: str, name: str) -> Answer:
        data = self.files[name]
        digest = hashlib.sha256(data).hexdigest()
        headers = {"X-Repo-Commit": commit, "ETag": f'"{digest}"'}
        if name.endswith(".json"):
            return 200, headers, data
        # Large files lie on another host; a redirect to the same one would mean a new name.
        elsewhere = self.url.replace("127.0.0.1", "localhost")
        headers |= {"X-Linked-ETag": f'"{digest}"', "X-Linked-Size": str(len(data))}
        return 302, headers | {"Location": f"{elsewhere}/cdn/{name}"}, b""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = urlsplit(self.path).path
        self.hub.log.append(f"{self.command} {path}")
        while self.hub.stalled:
            time.sleep(0.02)
        status, headers, body = self.hub.answer(path, self.headers.get("Authorization", ""))
        wanted = self.headers.get("Range")
        if wanted and status == 200:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
            status, body = 206, body[start:]
        with suppress(ConnectionError):  # a client that waits no longer
            self._send(path, status, headers, body)

    def _send(self, path: str, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if path.startswith("/cdn/") and self.hub.cuts > 0:
            self.hub.cuts -= 1
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
        else:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass
