"""A hub over real HTTP: which commit a name is, which files are wanted, and what is said where they cannot be had."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest

from infra.hub.client import Hub
from infra.hub.sources import HubError, HubFile, HubSource, HubUnavailable, chosen, place_of
from infra.settings import Settings
from tests.hub_server import ToyHub, toy_hub

MODEL = {
    "config.json": b"{}",
    "tokenizer.json": b"tokens",
    "qwen.tiktoken": b"ranks",
    "vocab.bpe": b"merges",
    "model-00001-of-00002.safetensors": b"one",
    "model-00002-of-00002.safetensors": b"two",
    "model.safetensors.index.json": b"index",
    "consolidated.safetensors": b"again",
    "pytorch_model.bin": b"pickle",
    "pytorch_model.bin.index.json": b"index of pickles",
    "onnx/model.onnx": b"other",
    "onnx/config.json": b"other",
    "additional_chat_templates/tools.jinja": b"{{ }}",
    "modeling.py": b"code",
    "README.md": b"words",
    "manifest.json": b"a name that the store has for a file of its own",
}
WANTED = {
    *("config.json", "tokenizer.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
    *("model.safetensors.index.json", "additional_chat_templates/tools.jinja", "qwen.tiktoken", "vocab.bpe"),
}
ROWS = ["data/test-00000-of-00001.parquet", "data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]


@pytest.fixture
def hub() -> Iterator[ToyHub]:
    with toy_hub() as server:
        yield server


def settings(hub: ToyHub, home: Path, **more: object) -> Settings:
    """Those of a machine on which nobody has logged in."""
    return Settings.model_validate({"hf_endpoint": hub.url, "hf_home": home, **more})


def of_model(revision: str | None = None, **more: object) -> HubSource:
    """A model of the tests."""
    return replace(HubSource("hf://us/small", "us/small", "model", revision), **more)


def files(*names: str) -> dict[str, HubFile]:
    return {name: HubFile(1) for name in names}


def test_a_revision_is_a_commit_and_the_main_branch_moves(hub: ToyHub, tmp_path: Path) -> None:
    first = hub.model("us/small", {"config.json": b"old"})
    hub.models["us/small"].tags["v1"] = first
    second = hub.model("us/small", MODEL)
    client = Hub(settings(hub, tmp_path))
    assert [client.look_up(of_model(name))[0] for name in (None, "main", "v1", first)] == [second, second, first, first]
    found = client.look_up(of_model())[1]
    assert found.keys() == MODEL.keys()
    assert found["config.json"] == HubFile(2)
    assert found["model-00001-of-00002.safetensors"].sha256 is not None


def test_of_a_model_come_its_weights_once_and_no_pickle_and_no_code() -> None:
    there = files(*MODEL)
    assert chosen(of_model(), there).keys() == WANTED
    assert chosen(of_model(code=True), there).keys() == {*WANTED, "modeling.py"}
    texts = {name for name in WANTED if not name.endswith(".safetensors")}
    assert chosen(of_model(kind="tokenizer"), there).keys() == texts


def of_data(path: str | None = None) -> HubSource:
    name = "hf://us/rows" + (f":{path}" if path else "")
    return HubSource(name, "us/rows", "dataset", path=path)


@pytest.mark.parametrize(
    ("path", "there", "wanted"),
    [
        (None, ["README.md", "rows.jsonl", "dataset_infos.json"], ["rows.jsonl"]),
        (None, ROWS[1:], ROWS[1:]),
        (ROWS[0], ROWS, ROWS[:1]),
        ("data/train-*.parquet", ROWS, ROWS[1:]),
        ("data", ROWS, ROWS),
        ("odd.name", ["odd.name", "rows.csv"], ["odd.name"]),
    ],
)
def test_rows_are_of_one_file_a_folder_or_a_pattern(path: str | None, there: list[str], wanted: list[str]) -> None:
    assert list(chosen(of_data(path), files(*there))) == wanted


@pytest.mark.parametrize(
    ("path", "there", "message"),
    [
        (
            None,
            ROWS,
            r"several data files, data/test-\*.parquet, data/train-\*.parquet: name one, as in hf://us/rows:",
        ),
        (None, ["README.md"], r"hf://us/rows has no data file \(.parquet, "),
        ("train.csv", ["rows.csv"], "hf://us/rows has no data file train.csv: it has rows.csv"),
    ],
)
def test_rows_that_are_not_clear_are_refused(path: str | None, there: list[str], message: str) -> None:
    with pytest.raises(HubError, match=message):
        chosen(of_data(path), files(*there))


def test_a_download_is_whole_and_counts_its_bytes(hub: ToyHub, tmp_path: Path) -> None:
    commit = hub.model("us/small", {**MODEL, "model-00001-of-00002.safetensors": b"w" * 3_000_000})
    client, source = Hub(settings(hub, tmp_path)), of_model(commit)
    wanted = chosen(source, client.look_up(source)[1])
    client.download(source, wanted, tmp_path / "here", lambda done, size: None)
    assert {name: (tmp_path / "here" / name).stat().st_size for name in wanted} == {
        name: file.size for name, file in wanted.items()
    }
    assert sorted(hub.downloaded()) == sorted(name.rpartition("/")[2] for name in WANTED)


def test_what_came_otherwise_than_the_hub_says_is_refused_and_comes_again(hub: ToyHub, tmp_path: Path) -> None:
    commit = hub.model("us/small", MODEL)
    client, source = Hub(settings(hub, tmp_path)), of_model(commit)
    wanted = chosen(source, client.look_up(source)[1])
    hub.changed["model-00002-of-00002.safetensors"] = b"TWO"
    with pytest.raises(
        HubUnavailable, match=r"model-00002-of-00002.safetensors of hf://us/small was not downloaded completely"
    ):
        client.download(source, wanted, tmp_path / "here", lambda done, size: None)
    hub.changed.clear()
    hub.asked.clear()
    client.download(source, wanted, tmp_path / "here", lambda done, size: None)
    assert hub.downloaded() == ["model-00002-of-00002.safetensors"]
    assert (tmp_path / "here" / "model-00002-of-00002.safetensors").read_bytes() == b"two"


def test_a_model_that_no_disk_holds_is_refused_before_it_comes(hub: ToyHub, tmp_path: Path) -> None:
    commit = hub.model("us/small", MODEL)
    with pytest.raises(HubError, match=r"hf://us/small needs 1048576.0 GiB more, and the disk of .* free: free"):
        Hub(settings(hub, tmp_path)).download(
            of_model(commit), {"model.safetensors": HubFile(2**50)}, tmp_path / "here", lambda done, size: None
        )
    assert hub.downloaded() == []


def test_what_is_here_already_needs_no_room(hub: ToyHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = hub.model("us/small", MODEL)
    client, source = Hub(settings(hub, tmp_path)), of_model(commit)
    wanted, here = chosen(source, client.look_up(source)[1]), tmp_path / "here"
    client.download(source, wanted, here, lambda done, size: None)
    kept = sum(path.stat().st_size for path in here.rglob("*") if path.is_file())
    more = {**wanted, "late.safetensors": HubFile(kept - sum(file.size for file in wanted.values()) + 10)}
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=9))
    with pytest.raises(HubError, match="free some"):
        client.download(source, more, here, lambda done, size: None)
    client.download(source, wanted, here, lambda done, size: None)
    (here / ".cache" / "late.incomplete").write_bytes(b"w")
    with pytest.raises(HubUnavailable, match=r"late.safetensors of hf://us/small was not downloaded completely"):
        client.download(source, more, here, lambda done, size: None)


@pytest.mark.parametrize(
    ("name", "revision", "message"),
    [
        (
            "us/nothing",
            None,
            r"^hf://us/nothing: http.* has no model us/nothing, or none that can be seen without a token: check ",
        ),
        ("us/small", "v9", r"hf://us/small: us/small has no revision v9: http.*/us/small/tree/main"),
        ("us/private", None, r"has no model us/private, .* for a private one, set HF_TOKEN$"),
    ],
)
def test_what_is_not_there_is_named_with_a_remedy(
    hub: ToyHub, tmp_path: Path, name: str, revision: str | None, message: str
) -> None:
    hub.model("us/small", MODEL)
    hub.model("us/private", MODEL)
    hub.models["us/private"].token = "secret"
    source = HubSource(f"hf://{name}", name, "model", revision)
    with pytest.raises(HubError, match=message) as refusal:
        Hub(settings(hub, tmp_path)).look_up(source)
    assert "\n" not in str(refusal.value)


def test_a_token_opens_what_is_private_and_gated(hub: ToyHub, tmp_path: Path) -> None:
    commit = hub.model("us/small", MODEL)
    repository = hub.models["us/small"]
    repository.gated, source = True, of_model(commit)
    with pytest.raises(HubError, match=r"is gated, and cannot be read without a token: accept its terms at .*small"):
        Hub(settings(hub, tmp_path)).require_readable(source, "config.json")
    with pytest.raises(HubError, match="is gated"):
        Hub(settings(hub, tmp_path)).read(source, "config.json", tmp_path / "one")
    repository.token = "mine"
    Hub(settings(hub, tmp_path, hf_token="mine")).require_readable(source, "config.json")
    (tmp_path / "token").write_text("mine\n")
    Hub(settings(hub, tmp_path)).read(source, "config.json", tmp_path / "two")
    assert (tmp_path / "two" / "config.json").read_bytes() == b"{}"


CLOSED = """
import os, sys
from infra.hub.client import Hub
from infra.hub.sources import HubError
from infra.settings import Settings

if os.geteuid() == 0:
    os.setuid(65534)
for home in sys.argv[1:]:
    try:
        Hub(Settings(hf_home=home))
    except HubError as error:
        print(error)
    Hub(Settings(hf_home=home, hf_token="mine"))
"""


def test_a_token_that_this_user_may_not_read_is_named() -> None:
    """By a process of a user who has no rights: root may read everything."""
    with TemporaryDirectory() as place:
        home = Path(place)
        home.chmod(0o755)
        (home / "token").write_text("of another user")
        (home / "token").chmod(0)
        (home / "closed").mkdir(mode=0)
        command = [sys.executable, "-c", CLOSED, place, f"{place}/closed", f"{place}/nowhere"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3])
        (home / "closed").chmod(0o700)
    assert done.returncode == 0, done.stderr
    told = [
        f"the Hugging Face token in {home / name}/token cannot be read (Permission denied): "
        for name in (".", "closed")
    ]
    assert [line.partition("give ")[0] for line in done.stdout.splitlines()] == told
    assert done.stdout.count("or set HF_TOKEN\n") == 2


@pytest.mark.parametrize(
    ("status", "raised", "message"),
    [
        (500, HubUnavailable, r"does not answer as it should \(HTTP 500\): try again"),
        (429, HubUnavailable, r"\(HTTP 429\)"),
        (403, HubError, "answers HTTP 403: see http"),
    ],
)
def test_an_answer_that_is_none_may_pass_or_not(
    hub: ToyHub, tmp_path: Path, status: int, raised: type[Exception], message: str
) -> None:
    hub.model("us/small", MODEL)
    hub.failures = [status]
    with pytest.raises(raised, match=message):
        Hub(settings(hub, tmp_path)).look_up(of_model())


def test_a_hub_that_is_not_there_may_come(tmp_path: Path) -> None:
    nowhere = Settings.model_validate({"hf_endpoint": "http://127.0.0.1:9", "hf_home": tmp_path})
    with pytest.raises(
        HubUnavailable, match=r"the hub at http://127.0.0.1:9 does not answer as it should \(ConnectError"
    ):
        Hub(nowhere).look_up(of_model())


@pytest.mark.parametrize(("name", "status"), [("us/small", 500), ("us/small", 403), ("us/nothing", 404)])
def test_no_password_of_an_address_is_shown(hub: ToyHub, tmp_path: Path, name: str, status: int) -> None:
    hub.model("us/small", MODEL)
    hub.failures = [status] if name == "us/small" else []
    client = Hub(settings(hub, tmp_path, hf_endpoint=hub.url.replace("://", "://user:secretpw@")))
    with pytest.raises((HubError, HubUnavailable), match=r"http://user:\*\*\*@127.0.0.1:") as refusal:
        client.look_up(HubSource(f"hf://{name}", name, "model"))
    assert "secretpw" not in str(refusal.value)


def test_offline_nothing_is_asked(hub: ToyHub, tmp_path: Path) -> None:
    with pytest.raises(HubError, match="hf://us/small is not in the store, and HF_HUB_OFFLINE forbids downloads"):
        Hub(settings(hub, tmp_path, hf_offline=True)).look_up(of_model())
    assert hub.asked == []


def test_a_place_is_a_folder_a_file_or_several(tmp_path: Path) -> None:
    assert place_of(tmp_path, "model") == tmp_path
    (tmp_path / "data" / "deep").mkdir(parents=True)
    (tmp_path / "data" / "deep" / "rows.csv").touch()
    assert place_of(tmp_path, "dataset") == tmp_path / "data" / "deep" / "rows.csv"
    (tmp_path / "data" / "more.csv").touch()
    assert place_of(tmp_path, "dataset") == tmp_path / "data"
