"""A local server that answers W&B's client as far as a run needs, or fails it in some way."""

import http.server
import json
import socket
import threading
from typing import Any


class FakeServer:
    """Answers (``ok``), refuses with 500 (``fails``), or accepts and says nothing (``hangs``)."""

    def __init__(self, behaviour: str) -> None:
        self.bodies: list[str] = []  # of all requests that arrived
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length).decode("utf-8", "replace")
                server.bodies.append(f"{self.path} {body}")
                if behaviour == "hangs":
                    server.closed.wait(60)
                    return
                fails = behaviour == "fails"
                content = (
                    b"" if fails else json.dumps({"data": answer_to(body, server.url)}).encode()
                )
                self.send_response(500 if fails else 200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_PUT = answer

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.closed = threading.Event()
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        """Die: from now on connections are refused."""
        self.closed.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def answer_to(body: str, url: str) -> dict[str, Any]:
    """What W&B's server would say, as far as the client insists on it."""
    if "upsertBucket" in body:
        name = json.loads(body)["variables"]["name"]
        project = {"id": "p", "name": "p", "entity": {"id": "e", "name": "e"}}
        bucket = {"id": name, "name": name, "displayName": name, "config": "{}", "project": project}
        return {"upsertBucket": {"bucket": {**bucket, "historyLineCount": 0}, "inserted": True}}
    if "createRunFiles" in body:
        names = json.loads(body)["variables"]["files"]
        files = [{"name": name, "uploadUrl": f"{url}/upload/{name}"} for name in names]
        return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": files}}
    return {}


def refused() -> str:
    """An address where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"
