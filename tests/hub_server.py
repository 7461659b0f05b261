"""A Hugging Face hub on loopback: the calls that making a repository, committing files and fetching them takes."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LARGE = 1000  # bytes from which a file is stored apart, as the hub does with large ones


class HubServer(ThreadingHTTPServer):
    """repos: files by path, by repository. commits: messages. tokens: accepted ones. private: repositories made so.

    Faults: busy: number of requests to refuse with 503. refuse: status of every write. silent: nothing is answered.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.objects: dict[str, bytes] = {}
        self.commits: list[str] = []
        self.private: set[str] = set()
        self.tokens = {"hf_right"}
        self.busy, self.refuse, self.silent, self.ended = 0, 0, False, threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address):
        """Nothing: clients may end a connection early."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _reply(self, content: object, status: int = 200) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_POST(self):
        server, body = self.server, self._body()
        if server.silent:
            server.ended.wait(60)
        if server.busy:
            server.busy -= 1
            return self._reply({}, 503)
        if self.headers.get("Authorization", "").removeprefix("Bearer ") not in server.tokens:
            return self._reply({"error": "Invalid token"}, 401)
        if server.refuse:
            return self._reply({"error": "no"}, server.refuse)
        if self.path == "/api/repos/create":
            wanted = json.loads(body)
            repo = f"{wanted['organization']}/{wanted['name']}"
            if repo in server.repos:
                return self._reply({"error": "exists", "url": f"{server.url}/{repo}"}, 409)
            server.repos[repo] = {}
            if wanted.get("private") or wanted.get("visibility") == "private":
                server.private.add(repo)
            return self._reply({"url": f"{server.url}/{repo}"})
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/main", self.path):
            files = [
                {"path": f["path"], "uploadMode": "lfs" if f["size"] >= LARGE else "regular", "shouldIgnore": False}
                for f in json.loads(body)["files"]
            ]
            return self._reply({"files": files})
        if found := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", self.path):
            objects = [
                {**each, "actions": {"upload": {"href": f"{server.url}/object/{each['oid']}"}}}
                for each in json.loads(body)["objects"]
            ]
            return self._reply({"transfer": "basic", "objects": objects})
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", self.path):
            files = server.repos[found[1]]
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "header":
                    server.commits.append(value["summary"])
                elif line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    files[value["path"]] = server.objects[value["oid"]]
            return self._reply({"commitUrl": f"{server.url}/{found[1]}/commit/1", "commitOid": "1"})
        return self._reply({"error": "unknown"}, 404)

    def do_PUT(self):
        data = self._body()
        oid = self.path.removeprefix("/object/")
        if hashlib.sha256(data).hexdigest() != oid:
            return self._reply({}, 400)
        self.server.objects[oid] = data
        return self._reply({})

    def do_GET(self):
        found = re.fullmatch(r"/([^/]+/[^/]+)/resolve/main/(.+)", self.path)
        data = self.server.repos.get(found[1], {}).get(found[2]) if found else None
        return self._reply({}, 404) if data is None else self._reply(data)

    def log_message(self, *arguments):
        """Nothing: the tests read ``commits``."""


@contextlib.contextmanager
def serving_hub() -> Iterator[HubServer]:
    with HubServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield server
        server.ended.set()
        server.shutdown()
        thread.join()
