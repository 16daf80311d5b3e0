"""A small Hugging Face hub in this process: the few addresses that a download asks for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.http_server import serving


@dataclass
class Repository:
    """Its commits with their files, in order; the last one is the main branch."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    token: str | None = None

    def commit(self, files: Mapping[str, bytes]) -> str:
        """Replace all files."""
        made = hashlib.sha1(repr((len(self.commits), sorted(files.items()))).encode()).hexdigest()
        self.commits[made] = dict(files)
        return made

    def resolve(self, revision: str) -> str | None:
        """The commit of a branch, a tag or a commit."""
        found = list(self.commits)[-1] if revision == "main" else self.tags.get(revision, revision)
        return found if found in self.commits else None


@dataclass
class ToyHub:
    """`models` and `datasets` by owner/name. `asked` has the requests; the next ones are answered with `failures`.

    Of files in `changed` other bytes are sent than the list of files says.
    """

    url: str = ""
    models: dict[str, Repository] = field(default_factory=dict)
    datasets: dict[str, Repository] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    failures: list[int] = field(default_factory=list)
    changed: dict[str, bytes] = field(default_factory=dict)

    def model(self, name: str, files: Mapping[str, bytes]) -> str:
        """A new commit of a model."""
        return self.models.setdefault(name, Repository()).commit(files)

    def dataset(self, name: str, files: Mapping[str, bytes]) -> str:
        """A new commit of a repository of data."""
        return self.datasets.setdefault(name, Repository()).commit(files)

    def downloaded(self) -> list[str]:
        """The files that were sent."""
        return [one.rpartition("/")[2] for one in self.asked if one.startswith("GET ") and "/resolve/" in one]


@contextmanager
def toy_hub() -> Iterator[ToyHub]:
    """A hub that ends with the block."""
    hub = ToyHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            """Silence."""

        def do_GET(self) -> None:
            status, headers, body = answer(hub, self.command, self.path, self.headers.get("authorization"))
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def do_HEAD(self) -> None:
            self.do_GET()

    with serving(Handler) as url:
        hub.url = url
        yield hub


def answer(hub: ToyHub, method: str, path: str, token: str | None) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body."""
    path = unquote(urlsplit(path).path)
    hub.asked.append(f"{method} {path}")
    if hub.failures:
        return hub.failures.pop(0), {}, b"no"
    parts = path.strip("/").split("/")
    api = parts[0] == "api"
    parts = parts[1:] if api else parts
    kind = parts.pop(0) if parts[0] in ("models", "datasets") else "models"
    owner, name, verb, revision, *rest = [*parts, "revision", "main"][: max(4, len(parts))]
    repository = (hub.datasets if kind == "datasets" else hub.models).get(f"{owner}/{name}")
    if repository is None or (repository.token and token != f"Bearer {repository.token}"):
        return 401, {"X-Error-Code": "RepoNotFound"}, b"{}"
    commit = repository.resolve(revision)
    if commit is None:
        return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
    files = repository.commits[commit]
    if verb == "revision":
        siblings = [{"rfilename": one, "size": len(content), **_lfs(one, content)} for one, content in files.items()]
        return 200, {}, json.dumps({"id": f"{owner}/{name}", "sha": commit, "siblings": siblings}).encode()
    if verb == "tree":
        entries = [
            {"type": "file", "path": one, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for one, content in files.items()
        ]
        return 200, {}, json.dumps(entries).encode()
    if repository.gated and token is None:
        return 403, {"X-Error-Code": "GatedRepo"}, b"{}"
    wanted = "/".join(rest)
    if wanted not in files:
        return 404, {"X-Error-Code": "EntryNotFound"}, b"{}"
    content = hub.changed.get(wanted, files[wanted])
    headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}
    return 200, headers, content


def _lfs(name: str, content: bytes) -> dict[str, Any]:
    if not name.endswith((".safetensors", ".parquet")):
        return {}
    digest = hashlib.sha256(content).hexdigest()
    return {"lfs": {"sha256": digest, "size": len(content), "pointerSize": 134}}
