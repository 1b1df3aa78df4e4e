"""A Hugging Face Hub on loopback that has one model, and the cache that huggingface_hub keeps."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread


class FakeHub:
    """Serves `folder` as `repository`, at the commit that `commit` names now. `requests`: what was
    asked for."""

    def __init__(self, repository: str, folder: Path, commit: str) -> None:
        self.repository, self.folder, self.commit = repository, folder, commit
        self.requests: list[str] = []
        self.sent: Counter[str] = Counter()  # bytes, by file
        self.status = 200  # of the question for a revision; anything else is an error

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Its base URL, for HF_ENDPOINT."""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(body=True)

            def do_HEAD(self) -> None:
                self._answer(body=False)

            def _answer(self, *, body: bool) -> None:
                path = self.path.partition("?")[0]
                hub.requests.append(path)
                status, headers, content = hub.answer(path)
                if (part := self.headers.get("range")) and status == 200:
                    status, content = 206, _part(content, part)
                if body and "/resolve/" in path:
                    hub.sent[path.rpartition("/")[2]] += len(content)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if body:
                    self.wfile.write(content)

            def log_message(self, format: str, *values: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        api, files = f"/api/models/{self.repository}", f"/{self.repository}/resolve/"
        if path.startswith(f"{api}/tree/"):
            return 200, {}, json.dumps([_entry(file) for file in self._files()]).encode()
        if path == api or path.startswith(f"{api}/revision/"):
            if self.status != 200:
                codes = {401: "RepoNotFound", 403: "GatedRepo", 404: "RevisionNotFound"}
                return self.status, {"X-Error-Code": codes.get(self.status, "")}, b"{}"
            info = {"id": self.repository, "sha": self.commit, "siblings": []}
            return 200, {}, json.dumps(info).encode()
        if path.startswith(files):
            name = path.removeprefix(files).partition("/")[2]
            if not (self.folder / name).exists():
                return 404, {"X-Error-Code": "EntryNotFound"}, b"{}"
            content = (self.folder / name).read_bytes()
            headers = {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": self.commit}
            return 200, headers, content
        return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"

    def _files(self) -> list[Path]:
        return sorted(path for path in self.folder.iterdir() if path.is_file())


def put_in_cache(cache: Path, repository: str, folder: Path, commit: str) -> Path:
    """The snapshot, as `hf download` leaves it: files of a snapshot are links to blobs."""
    stored = cache / f"models--{repository.replace('/', '--')}"
    snapshot = stored / "snapshots" / commit
    for made in (snapshot, stored / "blobs", stored / "refs"):
        made.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        blob = stored / "blobs" / _digest(file.read_bytes())
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(blob)
    (stored / "refs" / "main").write_text(commit)
    return snapshot


def _part(content: bytes, asked: str) -> bytes:
    """`asked`: bytes=FIRST-LAST."""
    first, _, last = asked.removeprefix("bytes=").partition("-")
    return content[int(first) : int(last) + 1]


def _entry(file: Path) -> dict[str, object]:
    content = file.read_bytes()
    return {"type": "file", "path": file.name, "size": len(content), "oid": _digest(content)}


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
