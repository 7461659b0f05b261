"""A Hugging Face hub on loopback: the calls that making a repository, committing, listing and fetching files takes."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType

import pytest
import yaml
from file_server import served

LICENSES = ("mit", "apache-2.0", "other")
LARGE = 1000  # bytes from which a file is stored apart, as the hub does with large ones


class HubServer(ThreadingHTTPServer):
    """repos: files by path, by repository. commits: messages. tokens: accepted ones. private: repositories made so.
    sent: hashes of large files that were received, and names of files that were fetched. old: files of earlier commits.

    Faults: busy: number of requests to refuse with 503. refuse: status of every write. silent: nothing is answered.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.objects: dict[str, bytes] = {}
        self.commits: list[str] = []
        self.private: set[str] = set()
        self.old: dict[str, dict[str, dict[str, bytes]]] = {}
        self.sent: list[str] = []
        self.tokens = {"hf_right"}
        self.busy, self.refuse, self.silent, self.ended = 0, 0, False, threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address):
        """Nothing: clients may end a connection early."""


def commit_of(files: Mapping[str, bytes]) -> str:
    """The id of a commit with these files."""
    text = json.dumps({name: hashlib.sha256(data).hexdigest() for name, data in sorted(files.items())})
    return hashlib.sha1(text.encode()).hexdigest()


def _tag(data: bytes) -> str:
    return (hashlib.sha256 if len(data) >= LARGE else hashlib.sha1)(data).hexdigest()


def _row(name: str, data: bytes) -> dict[str, object]:
    """A file in a listing."""
    row: dict[str, object] = {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
    return {**row, "lfs": {"oid": _tag(data), "size": len(data), "pointerSize": 1}} if len(data) >= LARGE else row


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _reply(self, content: object, status: int = 200, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _has_token(self) -> bool:
        return self.headers.get("Authorization", "").removeprefix("Bearer ") in self.server.tokens

    def _files(self, repo: str, revision: str) -> tuple[dict[str, bytes], str] | None:
        """The files of a revision and its commit; None after a reply that there are none."""
        repos = self.server.repos
        if repo not in repos or (repo in self.server.private and not self._has_token()):
            return self._reply({"error": "no"}, 401, {"X-Error-Code": "RepoNotFound"})
        head = commit_of(repos[repo])
        known = {"main": repos[repo], head: repos[repo], **self.server.old.get(repo, {})}
        if revision not in known:
            return self._reply({"error": "no"}, 404, {"X-Error-Code": "RevisionNotFound"})
        return known[revision], head if revision == "main" else revision

    def do_POST(self):
        server, body = self.server, self._body()
        if server.silent:
            server.ended.wait(60)
        if server.busy:
            server.busy -= 1
            return self._reply({}, 503)
        if not self._has_token():
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
        if self.path == "/api/validate-yaml":
            card = yaml.safe_load(json.loads(body)["content"].split("---\n")[1])
            problem = set() if card.get("license", "mit") in LICENSES else {"license is none that is known"}
            return self._reply({"errors": [{"message": each} for each in problem]}, 400 if problem else 200)
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/main", self.path):
            files = [
                {"path": f["path"], "uploadMode": "lfs" if f["size"] >= LARGE else "regular", "shouldIgnore": False}
                for f in json.loads(body)["files"]
            ]
            return self._reply({"files": files})
        if found := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", self.path):
            objects = [
                each
                if each["oid"] in server.objects  # nothing to do
                else {**each, "actions": {"upload": {"href": f"{server.url}/object/{each['oid']}"}}}
                for each in json.loads(body)["objects"]
            ]
            return self._reply({"transfer": "basic", "objects": objects})
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", self.path):
            files = server.repos[found[1]]
            server.old.setdefault(found[1], {})[commit_of(files)] = dict(files)
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "header":
                    server.commits.append(value["summary"])
                elif line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    files[value["path"]] = server.objects[value["oid"]]
                elif line["key"] == "deletedFile":
                    del files[value["path"]]
            commit = commit_of(files)
            return self._reply({"commitUrl": f"{server.url}/{found[1]}/commit/{commit}", "commitOid": commit})
        return self._reply({"error": "unknown"}, 404)

    def do_PUT(self):
        data = self._body()
        oid = self.path.removeprefix("/object/")
        if hashlib.sha256(data).hexdigest() != oid:
            return self._reply({}, 400)
        self.server.objects[oid] = data
        self.server.sent.append(oid)
        return self._reply({})

    def do_GET(self):
        if self.server.busy:
            self.server.busy -= 1
            return self._reply({}, 503)
        if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self.path):
            if (known := self._files(found[1], found[2])) is None:
                return None
            files, commit = known
            if (data := files.get(urllib.parse.unquote(found[3]))) is None:
                return self._reply({"error": "no"}, 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            if self.command == "GET":
                self.server.sent.append(found[3])
            return self._reply(data, 200, {"X-Repo-Commit": commit, "ETag": f'"{_tag(data)}"'})
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/?]+)\?(.*)", self.path):
            if (known := self._files(found[1], found[2])) is None:
                return None
            below = r"(?!)" if "recursive=true" in found[3].lower() else r"\w+/\w[\w.]*"  # in folders, not hostile
            return self._reply([_row(*each) for each in known[0].items() if not re.fullmatch(below, each[0])])
        return self._reply({}, 404)

    do_HEAD = do_GET

    def log_message(self, *arguments):
        """Nothing: the tests read ``commits``."""


@contextlib.contextmanager
def hub_to_use(monkeypatch, cache) -> Iterator[HubServer]:
    """A hub, to which huggingface_hub is logged in. cache: folder for what it fetches."""
    constants = pytest.importorskip("huggingface_hub.constants")
    for name, value in (
        ("HF_HUB_DISABLE_XET", True),
        ("HF_HUB_CACHE", str(cache)),
        ("HF_TOKEN_PATH", str(cache / "token")),
    ):
        monkeypatch.setattr(constants, name, value)
    with served(HubServer()) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_TOKEN", "hf_right")
        yield server
