"""A hub of one model on this machine: what huggingface_hub asks of the real one."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import re
import threading
from collections.abc import Generator
from dataclasses import dataclass, field

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """``files``: of ``name``, by path. ``token``: who has none is refused, where one is
    set. ``asked``: paths of files that were fetched, with where each began.
    ``breaks_at``: the next answer breaks off after so many bytes."""

    name: str
    files: dict[str, bytes]
    token: str = ""
    asked: list[tuple[str, int]] = field(default_factory=list)
    breaks_at: int | None = None
    url: str = ""

    def listed(self) -> list[dict[str, object]]:
        return [
            {"type": "file", "path": path, "size": len(data), "oid": digest(data)}
            for path, data in self.files.items()
        ]


def digest(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@contextlib.contextmanager
def serving_hub(hub: FakeHub) -> Generator[FakeHub]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None: ...

        def answer(self, status: int, data: bytes, **headers: str) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command == "GET":
                cut = hub.breaks_at if len(data) > (hub.breaks_at or 0) else None
                self.wfile.write(data[:cut])
                if cut is not None:
                    hub.breaks_at = None
                    self.close_connection = True

        def refuse(self, status: int, code: str) -> None:
            self.answer(status, b"{}", X_Error_Code=code, X_Error_Message=code)

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if hub.token and f"Bearer {hub.token}" != self.headers["Authorization"]:
                self.refuse(401, "GatedRepo")
            elif found := re.fullmatch(rf"/api/models/{hub.name}(?:/.*)?", path):
                self.tree(path, found)
            elif found := re.fullmatch(rf"/{hub.name}/resolve/([^/]+)/(.+)", path):
                self.file(found[2])
            else:
                self.refuse(404, "RepoNotFound")

        def tree(self, path: str, found: re.Match[str]) -> None:
            if not re.search(rf"/(main|v1|{COMMIT})$|{hub.name}$", found[0]):
                self.refuse(404, "RevisionNotFound")
                return
            said: object = {
                "id": hub.name,
                "sha": COMMIT,
                "siblings": [{"rfilename": name} for name in hub.files],
            }
            if "/tree/" in path:
                said = hub.listed()
            self.answer(200, json.dumps(said).encode(), Content_Type="application/json")

        def file(self, name: str) -> None:
            if name not in hub.files:
                self.refuse(404, "EntryNotFound")
                return
            data, start = hub.files[name], 0
            if asked := re.match(r"bytes=(\d+)-", self.headers["Range"] or ""):
                start = int(asked[1])
            if self.command == "GET":
                hub.asked.append((name, start))
            self.answer(
                206 if start else 200,
                data[start:],
                ETag=f'"{digest(data)}"',
                X_Repo_Commit=COMMIT,
                Content_Range=f"bytes {start}-{len(data) - 1}/{len(data)}",
            )

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
