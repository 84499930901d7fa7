"""resolve: a directory wins, the hub is asked once, every refusal says what to do."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from backend.errors import CheckpointError
from backend.hub import resolve

COMMITS = {"main": "a" * 40, "v1": "b" * 40, "a" * 40: "a" * 40, "b" * 40: "b" * 40}
FILES = {
    "README.md": b"not wanted",
    "config.json": b"{}",
    "merges.txt": b"#version",
    "model.safetensors": bytes(1000),
    "speech_tokenizer/config.json": b"[]",
}


class Hub(BaseHTTPRequestHandler):
    """The two routes of the hub that a snapshot needs, for one model ``someone/voice``."""

    def do_GET(self) -> None:
        self.server.asked.append(self.path)  # pyright: ignore[reportAttributeAccessIssue]
        parts = self.path.strip("/").split("/")
        if parts[:4] == ["api", "models", "someone", "voice"]:
            self._describe(parts[5] if len(parts) > 4 else "main")
        elif parts[:3] == ["someone", "voice", "resolve"] and parts[3] in COMMITS:
            self._file(COMMITS[parts[3]], "/".join(parts[4:]))
        else:
            self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET  # noqa: N815 - the name that http.server looks for

    def _describe(self, revision: str) -> None:
        if revision not in COMMITS:
            self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return
        siblings = [{"rfilename": name} for name in FILES]
        model = {
            "id": "someone/voice",
            "modelId": "someone/voice",
            "sha": COMMITS[revision],
            "siblings": siblings,
        }
        self._answer(200, json.dumps(model).encode(), {"Content-Type": "application/json"})

    def _file(self, commit: str, name: str) -> None:
        content = commit[:1].encode() + FILES[name]
        etag = f'"{hashlib.sha1(content).hexdigest()}"'
        self._answer(200, content, {"ETag": etag, "X-Repo-Commit": commit})

    def _answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


RESOLVE = """
import contextlib, io, json, sys
from backend.errors import CheckpointError
from backend.hub import resolve
answers = []
for name, options in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as shown:
        try:
            answer = ["found", str(resolve(name, **options))]
        except CheckpointError as error:
            answer = ["refused", str(error)]
    answers.append([*answer, shown.getvalue()])
print(json.dumps(answers))
"""

Answer = tuple[str, str, str]


def resolve_elsewhere(endpoint: str, cache: Path, *calls: tuple[str, dict[str, Any]]) -> list[Answer]:
    """What ``resolve`` does in a process of its own, since the client reads its settings when imported.

    For each call: "found" or "refused", the path or message, and what was shown meanwhile.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", RESOLVE, json.dumps(calls)],
        cwd=Path(__file__).parents[2],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    return [(kind, text, shown) for kind, text, shown in json.loads(done.stdout)]


@dataclass
class Answers:
    """The same model asked for with a hub, offline beside a hub, and with a hub that cannot be reached."""

    online: dict[str, Answer]
    offline: dict[str, Answer]
    unreachable: dict[str, Answer]
    asked_offline: list[str]


ONLINE: dict[str, tuple[str, dict[str, Any]]] = {
    "main": ("someone/voice", {"progress": True}),
    "v1": ("someone/voice", {"revision": "v1"}),
    "v2": ("someone/voice", {"revision": "v2"}),
    "else": ("someone/else", {}),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    cache = tmp_path_factory.mktemp("cache")
    offline = {label: (name, {**options, "offline": True}) for label, (name, options) in ONLINE.items()}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked = []  # pyright: ignore[reportAttributeAccessIssue]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        address = f"http://127.0.0.1:{server.server_address[1]}"
        online_answers = resolve_elsewhere(address, cache, *ONLINE.values())
        server.asked.clear()  # pyright: ignore[reportAttributeAccessIssue]
        offline_answers = resolve_elsewhere(address, cache, *offline.values())
        asked: list[str] = list(server.asked)  # pyright: ignore[reportAttributeAccessIssue]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    unreachable = resolve_elsewhere(address, cache, *ONLINE.values())
    return Answers(
        online=dict(zip(ONLINE, online_answers, strict=True)),
        offline=dict(zip(ONLINE, offline_answers, strict=True)),
        unreachable=dict(zip(ONLINE, unreachable, strict=True)),
        asked_offline=asked,
    )


def contents(path: str) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in Path(path).rglob("*") if file.is_file()}


def test_a_model_is_downloaded_with_a_progress_bar(answers: Answers) -> None:
    kind, path, shown = answers.online["main"]
    assert kind == "found", path
    assert contents(path) == {name: b"a" + data for name, data in FILES.items() if name != "README.md"}
    assert "Fetching 4 files" in shown


def test_a_pinned_revision_is_downloaded_silently(answers: Answers) -> None:
    kind, path, shown = answers.online["v1"]
    assert kind == "found", path
    assert contents(path)["config.json"] == b"b{}"
    assert shown == ""


def test_the_cache_serves_without_asking(answers: Answers) -> None:
    assert answers.asked_offline == []
    for label in ("main", "v1"):
        assert answers.offline[label][:2] == answers.online[label][:2]
        assert answers.unreachable[label][:2] == answers.online[label][:2]


def test_an_unknown_name_or_revision_is_refused(answers: Answers) -> None:
    assert answers.online["v2"][:2] == ("refused", "someone/voice has no revision v2")
    expected = "there is no directory and no model someone/else on the hub"
    assert answers.online["else"][:2] == ("refused", expected)


def test_without_a_cached_copy_it_says_what_to_run(answers: Answers) -> None:
    for found, why in ((answers.offline, "offline"), (answers.unreachable, "the hub cannot be reached")):
        expected = f"someone/voice at revision v2 is not in the local cache and {why}: run `hf download"
        assert found["v2"][1].startswith(f"{expected} someone/voice --revision v2`")
        assert found["else"][1].startswith(f"someone/else is not in the local cache and {why}")


def test_a_local_directory_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "someone" / "voice").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve("someone/voice", offline=True) == Path("someone/voice")
    assert resolve(tmp_path) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/someone") == tmp_path / "someone"


@pytest.mark.parametrize("name", ["nowhere", "./someone/voice", "/no/such/place", "../a/b", "", "a/b/c", "a b/c"])
def test_what_is_no_hub_id_is_not_looked_up(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="neither a directory nor a hub id"):
        resolve(name)


def test_a_file_is_no_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(CheckpointError, match="is a file"):
        resolve(file)
