"""A local server that speaks the Hugging Face Hub's protocol, as far as we upload and load."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

COMMIT = "c" * 40


@contextmanager
def serve(root: Path) -> Iterator[dict[str, str]]:
    """A Hub of ``root/models/*/*`` and ``root/datasets/*/*``, and its user's environment."""

    class Handler(Hub):
        folder = root

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        yield {"HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(root / "home")}
    finally:
        server.shutdown()
        server.server_close()


class Hub(BaseHTTPRequestHandler):
    """Any revision of a repository is its folder; uploads are taken as they are."""

    folder: Path

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if found := re.fullmatch(r"/api/(\w+)/(.+?/.+?)/tree/[^/]+/?(.*)", path):
            repository = self.folder / found[1] / found[2]
            pattern = "**/*" if "recursive=true" in self.path else "*"
            files = sorted((repository / unquote(found[3])).glob(pattern))
            self.answer([about(file, repository) for file in files] or None)
        elif found := re.fullmatch(r"/api/(\w+)/([^/]+/[^/]+)(/revision/.+)?", path):
            exists = (self.folder / found[1] / found[2]).is_dir()
            self.answer({"id": found[2], "sha": COMMIT, "siblings": []} if exists else None)
        elif found := re.fullmatch(r"/(datasets/)?(.+?/.+?)/resolve/[^/]+/(.+)", path):
            file = self.folder / (found[1] or "models") / found[2] / found[3]
            self.answer(file.read_bytes() if file.is_file() else None)
        else:
            self.answer(None)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        here = f"http://{self.headers['Host']}"
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            self.answer({"url": f"{here}/{asked['organization']}/{asked['name']}"})
        elif self.path.endswith("/preupload/main"):
            paths = [file["path"] for file in json.loads(body)["files"]]
            how = {"uploadMode": "regular", "shouldIgnore": False}
            self.answer({"files": [{"path": path, **how} for path in paths]})
        elif found := re.fullmatch(r"/api/models/(.+)/commit/main", self.path):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    file = self.folder / "models" / found[1] / line["value"]["path"]
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_bytes(base64.b64decode(line["value"]["content"]))
            self.answer({"commitOid": COMMIT, "commitUrl": f"{here}/{found[1]}/commit/{COMMIT}"})
        else:  # of the model card, which is not checked here
            self.answer({})

    def answer(self, value: Any) -> None:
        """Send a file's bytes, anything else as JSON, and None as a missing entry or repository."""
        content = value if isinstance(value, bytes) else json.dumps(value or {}).encode()
        self.send_response(404 if value is None else 200)
        if value is None:
            of_repository = "/resolve/" in self.path or "/tree/" in self.path
            self.send_header("X-Error-Code", "EntryNotFound" if of_repository else "RepoNotFound")
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def about(path: Path, repository: Path) -> dict[str, Any]:
    """A file or a folder of a repository, as the Hub lists it."""
    content = path.read_bytes() if path.is_file() else b""
    return {
        "type": "file" if path.is_file() else "directory",
        "path": path.relative_to(repository).as_posix(),
        "size": len(content),
        "oid": hashlib.sha1(content).hexdigest(),
    }
