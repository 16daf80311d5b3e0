"""Documents that are written once: of several writers of one name exactly one wins, in any store."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infra.backend import open_log
from infra.storage.write_once import WriteOnceLog
from tests.infra.places import Bucket, Folder
from tests.waiting import LONG_S

WRITERS = 8


@pytest.fixture(params=["folder", "bucket", "S3"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> WriteOnceLog:
    """The documents of one model in a store; on S3 those of a server."""
    if request.param == "S3":
        return open_log(f"s3://{request.getfixturevalue('bucket')}/team/store", "promotions").below("m")
    place = Folder(tmp_path) if request.param == "folder" else Bucket()
    return place.log("promotions").below("m")


def read(log: WriteOnceLog, name: str) -> bytes | None:
    return log.read(name, bytes, ValueError)


def test_a_document_is_created_once(log: WriteOnceLog):
    assert (log.names(), log.folders(), read(log, "a")) == ([], [], None)
    assert log.create("a", b"one")
    assert not log.create("a", b"two")
    assert read(log, "a") == b"one"
    assert log.below("x").create("b", b"three")
    assert (log.names(), log.folders(), log.below("x").names()) == (["a"], ["x"], ["b"])


def test_one_of_eight_writes_each_document(log: WriteOnceLog, request: pytest.FixtureRequest):
    start, rounds = threading.Barrier(WRITERS, timeout=LONG_S), 5 if "S3" in request.node.name else 50

    def write(number: int) -> list[int]:
        won = []
        for page in range(rounds):
            start.wait()
            won += [page] if log.create(f"{page:03d}", f"{number} {page}".encode()) else []
        return won

    with ThreadPoolExecutor(WRITERS) as pool:
        won = list(pool.map(write, range(WRITERS)))
    assert sorted(page for pages in won for page in pages) == list(range(rounds))
    assert log.names() == [f"{page:03d}" for page in range(rounds)]
    for number, pages in enumerate(won):
        assert all(read(log, f"{page:03d}") == f"{number} {page}".encode() for page in pages)


def test_nothing_else_lies_in_a_folder(tmp_path: Path):
    log = Folder(tmp_path).log("promotions")
    for content in (b"one", b"two"):
        log.create("a", content)
    assert [path.name for path in (tmp_path / "promotions").iterdir()] == ["a"]


def test_links_are_what_they_point_to(tmp_path: Path):
    elsewhere = Folder(tmp_path / "elsewhere").log("pages")
    elsewhere.create("a", b"one")
    log = Folder(tmp_path / "store").log("promotions")
    log.create("b", b"two")
    here, there = tmp_path / "store/promotions", tmp_path / "elsewhere/pages"
    (here / "a").symlink_to(there / "a")
    (here / "m").symlink_to(there)
    assert (log.names(), log.folders()) == (["a", "b"], ["m"])
    assert (read(log, "a"), log.below("m").names(), read(log.below("m"), "a")) == (b"one", ["a"], b"one")


def test_what_is_neither_file_nor_folder_is_listed_and_cannot_be_read(tmp_path: Path):
    log = Folder(tmp_path).log("promotions")
    log.create("a", b"one")
    (tmp_path / "promotions/gone").symlink_to("/not/mounted")
    os.mkfifo(tmp_path / "promotions/pipe")
    assert (log.names(), log.folders()) == (["a", "gone", "pipe"], ["gone", "pipe"])
    for name in ("gone", "pipe"):
        with pytest.raises(OSError, match=name):
            read(log, name)
        with pytest.raises(OSError, match=name):
            log.below(name).names()
