"""A Hugging Face Hub of one model on this machine: what its client uploads, it can download."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

NAME, COMMIT = "me/squares", "1" * 40


@contextmanager
def fake_hub() -> Iterator[tuple[str, dict[str, bytes]]]:
    """Its address, and the files that it holds."""
    files: dict[str, bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            address = f"http://{self.headers['Host']}/{NAME}"
            if self.path == "/api/repos/create":
                self.answer({"url": address})
            elif "/preupload/" in self.path:
                kind = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
                asked = json.loads(body)["files"]
                self.answer({"files": [{"path": file["path"], **kind} for file in asked]})
            elif "/commit/" in self.path:
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                self.answer({"commitUrl": f"{address}/commit/{COMMIT}", "commitOid": COMMIT})
            else:  # metadata of the card
                self.answer({"errors": [], "warnings": []})

        def do_GET(self) -> None:
            name = self.path.rpartition("/")[2]
            if "/resolve/" in self.path:
                self.send_response(200)
                self.send_header("ETag", f'"{hashlib.sha1(files[name]).hexdigest()}"')
                self.send_header("X-Repo-Commit", COMMIT)
                self.send_header("Content-Length", str(len(files[name])))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(files[name])
            elif "/tree/" in self.path:
                kind = {"type": "file", "oid": COMMIT}
                self.answer([{"path": n, "size": len(files[n]), **kind} for n in files])
            else:
                siblings = [{"rfilename": name} for name in files]
                self.answer({"id": NAME, "sha": COMMIT, "siblings": siblings})

        do_HEAD = do_GET

        def answer(self, content: Any) -> None:
            encoded = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(encoded)))
            self.end_headers()
            self.wfile.write(encoded)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", files
    finally:
        server.shutdown()
        server.server_close()
