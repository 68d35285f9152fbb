"""A Hugging Face Hub on loopback, for tests: what huggingface_hub 2.4 asks for when it pushes and loads a model.

Repositories live in memory. Faults come before the real answers. HF_HUB_DISABLE_XET=1 turns the client to LFS.
"""

import base64
import hashlib
import json
import re
import socket
import struct
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_loopbackCanaryWrite1234567890"
NAME = "ann"
ORG = "lab"


@dataclass
class Repo:
    private: bool
    commits: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"0" * 40: {}})
    branches: dict[str, str] = field(default_factory=lambda: {"main": "0" * 40})

    def files(self, revision: str) -> dict[str, bytes] | None:
        return self.commits.get(self.branches.get(revision, revision))


class HubServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}  # large files by sha256
        self.faults: list[tuple[str, int | str]] = []  # the pattern of a request, and what it meets
        self.log: list[str] = []  # `METHOD path` of every request, in order
        self.received = 0  # bytes of large files
        self.lock = threading.RLock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *exception):
        self.shutdown()
        self.server_close()

    def handle_error(self, request, client_address):
        pass  # a client that hung up, or a connection that was cut

    def fault(self, pattern: str, kind: int | str, times: int = 1) -> None:
        """Meets the next `times` requests whose `METHOD path` matches: an HTTP status, cut or silent."""
        self.faults += [(pattern, kind)] * times

    def count(self, pattern: str) -> int:
        return sum(bool(re.search(pattern, line)) for line in self.log)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or each answer waits 40 ms between its head and its body
    server: HubServer

    def log_message(self, *args):
        pass

    def _handle(self):
        self.route = unquote(urlsplit(self.path).path)
        line = f"{self.command} {self.route}"
        with self.server.lock:
            self.server.log.append(line)
            fault = next((fault for fault in self.server.faults if re.search(fault[0], line)), None)
            if fault:
                self.server.faults.remove(fault)
        if fault and fault[1] == "cut":
            return self._cut()
        if fault and fault[1] == "silent":
            return self.rfile.read()  # until the client gives up
        if fault:
            self._body()
            return self._send(fault[1], {"error": ""}, {"Retry-After": "0"})
        try:
            self.body = self._body()
            self.is_known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
            with self.server.lock:
                self._answer()
        except ConnectionError:
            self.close_connection = True

    do_GET = do_POST = do_PUT = do_HEAD = _handle

    def _answer(self):
        for methods, pattern, answer in _ROUTES:
            found = re.fullmatch(pattern, self.route)
            if found and self.command in methods.split():
                return answer(self, **found.groupdict())
        self._send(404, {"error": f"not served here: {self.command} {self.route}"})

    def create(self):
        asked = json.loads(self.body)
        owner = asked.get("organization") or NAME
        repo = f"{owner}/{asked['name']}"
        url = {"url": f"{self.server.url}/{repo}", "name": repo}
        if not self.is_known:
            return self._send(401, {}, {"X-Error-Message": "Invalid credentials in Authorization header"})
        if owner not in (NAME, ORG):
            return self._send(403, {})
        if repo in self.server.repos:
            return self._send(409, url)
        self.server.repos[repo] = Repo(asked.get("visibility") == "private")
        self._send(200, url)

    def auth_check(self, repo: str):
        if self._repo(repo):
            self._send(200, {})

    def info(self, repo: str, revision: str | None = None):
        if (found := self._files(repo, revision or "main")) is not None:
            here = self.server.repos[repo]
            sha = here.branches.get(revision or "main", revision)
            names = [{"rfilename": name} for name in found]
            self._send(200, {"id": repo, "sha": sha, "private": here.private, "siblings": names})

    def tree(self, repo: str, revision: str, folder: str | None = None):
        if (files := self._files(repo, revision)) is None:
            return
        if folder:  # none of ours
            return self._send(404, {}, {"X-Error-Code": "EntryNotFound"})
        items = files.items()
        self._send(200, [{"type": "file", "path": n, "size": len(data), "oid": _git_oid(data)} for n, data in items])

    def branch(self, repo: str, revision: str):
        if here := self._repo(repo):
            if revision in here.branches:
                return self._send(409, {})
            here.branches[revision] = here.branches["main"]
            self._send(200, {})

    def preupload(self, repo: str, revision: str):
        if (files := self._files(repo, revision)) is None:
            return
        answer = []
        for asked in json.loads(self.body)["files"]:
            name = asked["path"]
            is_large = name.endswith((".safetensors", ".png"))
            hash_file = _sha256 if is_large else _git_oid
            oid = hash_file(files[name]) if name in files else None
            mode = "lfs" if is_large else "regular"
            answer.append({"path": name, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self._send(200, {"files": answer})

    def lfs_batch(self, repo: str):
        if self._repo(repo):
            objects = [{"oid": asked["oid"], "size": asked["size"]} for asked in json.loads(self.body)["objects"]]
            for entry in objects:
                if entry["oid"] not in self.server.objects:
                    entry["actions"] = {"upload": {"href": f"{self.server.url}/lfs/{entry['oid']}"}}
            self._send(200, {"transfer": "basic", "objects": objects})

    def lfs_put(self, oid: str):
        self.server.received += len(self.body)
        assert _sha256(self.body) == oid
        self.server.objects[oid] = self.body
        self._send(200, {})

    def commit(self, repo: str, revision: str):
        if (old := self._files(repo, revision)) is None:
            return
        files = dict(old)
        for line in self.body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]]
            elif item["key"] == "deletedFile":
                del files[value["path"]]
        here = self.server.repos[repo]
        oid = hashlib.sha1(here.branches[revision].encode() + self.body).hexdigest()
        here.commits[oid] = files
        here.branches[revision] = oid
        self._send(200, {"commitUrl": f"{self.server.url}/{repo}/commit/{oid}", "commitOid": oid})

    def validate_yaml(self):
        self._send(200, {"errors": [], "warnings": []})

    def resolve(self, repo: str, revision: str, name: str):
        if (files := self._files(repo, revision)) is None:
            return
        if name not in files:
            return self._send(404, {}, {"X-Error-Code": "EntryNotFound"})
        data = files[name]
        commit = self.server.repos[repo].branches.get(revision, revision)
        self._send(200, data, {"ETag": f'"{_git_oid(data)}"', "X-Repo-Commit": commit})

    def _repo(self, repo: str) -> Repo | None:
        """Reads are free where the repository is not private; nothing here writes without a token."""
        here = self.server.repos.get(repo)
        if here is None or (here.private and not self.is_known):
            return self._send(404, {}, {"X-Error-Code": "RepoNotFound"})
        return here

    def _files(self, repo: str, revision: str) -> dict[str, bytes] | None:
        here = self._repo(repo)
        files = here and here.files(revision)
        if here and files is None:
            self._send(404, {}, {"X-Error-Code": "RevisionNotFound"})
        return files

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _cut(self):
        self.rfile.read(1)
        # Linger 0: a reset, as of a line that breaks, not an orderly end
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    def _send(self, status: int, content, headers: dict[str, str] | None = None):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


_REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"
_REV = r"(?P<revision>[\w.-]+(?:/[\w.-]+)?)"
_ROUTES = [
    ("POST", "/api/repos/create", _Handler.create),
    ("POST", "/api/validate-yaml", _Handler.validate_yaml),
    ("GET", f"/api/models/{_REPO}/auth-check(/write)?", _Handler.auth_check),
    ("GET", f"/api/models/{_REPO}/tree/(?P<revision>[\\w.-]+)(/(?P<folder>.+))?", _Handler.tree),
    ("POST", f"/api/models/{_REPO}/branch/{_REV}", _Handler.branch),
    ("POST", f"/api/models/{_REPO}/preupload/{_REV}", _Handler.preupload),
    ("POST", f"/api/models/{_REPO}/commit/{_REV}", _Handler.commit),
    ("GET", f"/api/models/{_REPO}(/revision/{_REV})?", _Handler.info),
    ("POST", f"/{_REPO}\\.git/info/lfs/objects/batch", _Handler.lfs_batch),
    ("PUT", r"/lfs/(?P<oid>[0-9a-f]{64})", _Handler.lfs_put),
    ("GET HEAD", f"/{_REPO}/resolve/(?P<revision>[\\w.-]+)/(?P<name>.+)", _Handler.resolve),
]
