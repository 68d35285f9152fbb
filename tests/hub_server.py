"""A Hugging Face Hub on loopback, for tests: what huggingface_hub 2.4 asks for when it pushes and loads a model.

Repositories, branches and files live in memory. Faults are put in front of the real answers: a status, a connection
cut in the middle of what the client sends, or silence. The xet protocol is not spoken: HF_HUB_DISABLE_XET=1 turns the
client to the LFS protocol.
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

TOKEN, READ_TOKEN = "hf_loopbackCanaryWrite1234567890", "hf_loopbackCanaryRead1234567890"
NAME, ORG = "ann", "lab"


@dataclass
class Repo:
    private: bool
    commits: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"0" * 40: {}})
    branches: dict[str, str] = field(default_factory=lambda: {"main": "0" * 40})

    def files(self, revision: str) -> dict[str, bytes] | None:
        return self.commits.get(self.branches.get(revision, revision))


@dataclass
class Fault:
    pattern: str
    kind: int | str
    times: int = 1
    seconds: float = 0.0


class HubServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}  # large files by sha256
        self.faults: list[Fault] = []
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

    def fault(self, pattern: str, kind: int | str, **more) -> None:
        """Meets the next `times` requests whose `METHOD path` matches: an HTTP status, cut, or slow (`seconds`)."""
        self.faults.append(Fault(pattern, kind, **more))

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
            fault = next((f for f in self.server.faults if f.times and re.search(f.pattern, line)), None)
            if fault:
                fault.times -= 1
        if fault and fault.kind == "cut":
            return self._cut()
        if fault and fault.kind == "slow":
            threading.Event().wait(fault.seconds)
        elif fault:
            self._body()
            return self._send(fault.kind, {"error": ""}, {"Retry-After": "0"})
        try:
            self.body = self._body()
            user = self.headers.get("Authorization", "").removeprefix("Bearer ")
            self.role = {TOKEN: "write", READ_TOKEN: "read"}.get(user)
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

    # ---- answers

    def whoami(self):
        if not self.role:
            return self._send(401, {"error": "Invalid credentials in Authorization header"}, _MESSAGE)
        self._send(200, {"name": NAME, "orgs": [{"name": ORG}], "auth": {"accessToken": {"role": self.role}}})

    def create(self):
        asked = json.loads(self.body)
        repo = f"{asked.get('organization') or NAME}/{asked['name']}"
        url = {"url": f"{self.server.url}/{repo}", "name": repo}
        if self.role != "write" or repo.split("/")[0] not in (NAME, ORG):
            return self._send(403, {"error": "no rights"}, {"X-Error-Message": f"You don't have the rights to {repo}"})
        if repo in self.server.repos:
            return self._send(409, url | {"error": "You already created this model repo"})
        self.server.repos[repo] = Repo(asked.get("visibility") == "private")
        self._send(200, url)

    def auth_check(self, repo: str):
        if self._repo(repo):
            self._send(200 if self.role == "write" else 403, {})

    def info(self, repo: str, revision: str | None = None):
        if (found := self._files(repo, revision or "main")) is not None:
            here = self.server.repos[repo]
            sha = here.branches.get(revision or "main", revision)
            names = [{"rfilename": name} for name in found]
            self._send(200, {"id": repo, "modelId": repo, "sha": sha, "private": here.private, "siblings": names})

    def tree(self, repo: str, revision: str, folder: str | None = None):
        if (files := self._files(repo, revision)) is not None:
            start = f"{folder}/" if folder else ""
            names = [name for name in files if name.startswith(start)]
            if folder and not names:
                return self._send(404, {}, {"X-Error-Code": "EntryNotFound"})
            entry = {"type": "file"}
            self._send(200, [entry | {"path": n, "size": len(files[n]), "oid": _git_oid(files[n])} for n in names])

    def branch(self, repo: str, revision: str):
        if here := self._repo(repo, write=True):
            if revision in here.branches:
                return self._send(409, {"error": "Reference already exists"})
            here.branches[revision] = here.branches["main"]
            self._send(200, {})

    def preupload(self, repo: str, revision: str):
        if self._repo(repo, write=True) and (files := self._files(repo, revision)) is not None:
            answer = []
            for asked in json.loads(self.body)["files"]:
                large = asked["path"].endswith((".safetensors", ".png")) or asked["size"] > 10 * 2**20
                old = files.get(asked["path"])
                oid = None if old is None else hashlib.sha256(old).hexdigest() if large else _git_oid(old)
                mode = "lfs" if large else "regular"
                answer.append({"path": asked["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
            self._send(200, {"files": answer})

    def lfs_batch(self, repo: str):
        if self._repo(repo, write=True):
            objects = [{"oid": asked["oid"], "size": asked["size"]} for asked in json.loads(self.body)["objects"]]
            for entry in objects:
                href = f"{self.server.url}/lfs/{entry['oid']}"
                if entry["oid"] not in self.server.objects:
                    entry["actions"] = {"upload": {"href": href}, "verify": {"href": f"{href}/verify"}}
            self._send(200, {"transfer": "basic", "objects": objects})

    def lfs_put(self, oid: str):
        self.server.received += len(self.body)
        is_whole = hashlib.sha256(self.body).hexdigest() == oid
        if is_whole:
            self.server.objects[oid] = self.body
        self._send(200 if is_whole else 422, {})

    def lfs_verify(self, oid: str):
        asked, there = json.loads(self.body), self.server.objects.get(oid)
        self._send(200 if there is not None and len(there) == asked["size"] else 422, {})

    def commit(self, repo: str, revision: str):
        here = self._repo(repo, write=True)
        if not here or (files := self._files(repo, revision)) is None:
            return None
        files, header = dict(files), None
        for line in self.body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                header = value
            elif item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                if value["oid"] not in self.server.objects:
                    return self._send(422, {"error": f"{value['path']} was not uploaded"})
                files[value["path"]] = self.server.objects[value["oid"]]
            elif item["key"] == "deletedFile":
                del files[value["path"]]
        content = json.dumps([here.branches[revision], header, {k: _git_oid(v) for k, v in files.items()}])
        oid = hashlib.sha1(content.encode()).hexdigest()
        here.commits[oid], here.branches[revision] = files, oid
        self._send(200, {"commitUrl": f"{self.server.url}/{repo}/commit/{oid}", "commitOid": oid})

    def validate_yaml(self):
        self._send(200, {"errors": [], "warnings": []})

    def resolve(self, repo: str, revision: str, name: str):
        if (files := self._files(repo, revision)) is None:
            return
        if name not in files:
            return self._send(404, {}, {"X-Error-Code": "EntryNotFound"})
        here, data = self.server.repos[repo], files[name]
        commit = here.branches.get(revision, revision)
        self._send(200, data, {"ETag": f'"{_git_oid(data)}"', "X-Repo-Commit": commit})

    # ---- what they share

    def _repo(self, repo: str, write: bool = False) -> Repo | None:
        here = self.server.repos.get(repo)
        if here is None or (here.private and not self.role):
            self._send(404 if self.role else 401, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        elif write and self.role != "write":
            self._send(403, {"error": "no rights"})
        else:
            return here
        return None

    def _files(self, repo: str, revision: str) -> dict[str, bytes] | None:
        here = self._repo(repo)
        files = here and here.files(revision)
        if here and files is None:
            self._send(404, {"error": f"Invalid rev id: {revision}"}, {"X-Error-Code": "RevisionNotFound"})
        return files

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            chunks = []
            while size := int(self.rfile.readline(), 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(chunks)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _cut(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0) // 2)
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


def _git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


_MESSAGE = {"X-Error-Message": "Invalid credentials in Authorization header"}
_REPO, _REV = r"(?P<repo>[\w.-]+/[\w.-]+)", r"(?P<revision>[\w.-]+(?:/[\w.-]+)?)"
_ROUTES = [
    ("GET", "/api/whoami-v2", _Handler.whoami),
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
    ("POST", r"/lfs/(?P<oid>[0-9a-f]{64})/verify", _Handler.lfs_verify),
    ("GET HEAD", f"/{_REPO}/resolve/(?P<revision>[\\w.-]+)/(?P<name>.+)", _Handler.resolve),
]
