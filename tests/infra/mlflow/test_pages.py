"""The journal of an alias in a bucket: of eight that write one page at once exactly one does."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from infra.mlflow.alias_journal import Journal, Journals, Move
from infra.storage.objects import Objects
from infra.storage.write_once_objects import S3Pages
from tests.infra.storage.s3.memory_objects import MemoryObjects
from tests.infra.storage.s3.s3_server import S3Server
from tests.waiting import LONG_S

WRITERS = 8


def move(number: int, by: str) -> Move:
    return Move(number=number, model="m", alias="champion", action="promote", version="1", before=None, by=by, at_ms=1)


@pytest.mark.parametrize(("rounds", "real"), [(50, False), (5, True)])
def test_one_of_eight_writes_each_page(rounds: int, real: bool, s3_server: S3Server) -> None:
    objects: Objects = s3_server.objects(s3_server.make_bucket()) if real else MemoryObjects()
    start = threading.Barrier(WRITERS, timeout=LONG_S)

    def write(number: int) -> list[int]:
        journal, won = Journal(S3Pages(objects, "a/promotions/m/"), "m"), []
        for page in range(1, rounds + 1):
            start.wait()
            won += [page] if journal.append(move(page, str(number))) else []
        return won

    with ThreadPoolExecutor(WRITERS) as pool:
        won = list(pool.map(write, range(WRITERS)))
    assert sorted(page for pages in won for page in pages) == list(range(1, rounds + 1))
    moves = Journal(S3Pages(objects, "a/promotions/m/"), "m").moves()
    assert [page for found in moves for page in won[int(found.by)] if page == found.number] == list(
        range(1, rounds + 1)
    )


def test_a_store_on_s3_keeps_its_journals_there(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    root = f"s3://{s3_server.make_bucket()}/team/store"
    assert Journals(root).models() == []
    journal = Journals(root).of("a b")
    assert journal.moves() == []
    assert journal.append(move(1, "anna"))
    assert not journal.append(move(1, "anna"))
    [made] = Journals(root).of("a b").moves()
    assert made == move(1, "anna")
    assert not journal.has_followed(made)
    journal.note_followed(made)
    assert Journals(root).of("a b").has_followed(made)
    assert Journals(root).models() == ["a b"]
