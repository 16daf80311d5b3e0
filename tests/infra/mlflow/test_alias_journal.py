"""The journal of a model's aliases: numbered moves, each written once, in any store."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infra.mlflow.alias_journal import Journal, Journals, Move, folder_name, model_name
from tests.infra.places import Place
from tests.waiting import LONG_S


@pytest.fixture(params=["folder", "S3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of an empty store."""
    return str(tmp_path) if request.param == "folder" else f"s3://{request.getfixturevalue('bucket')}/team/store"


def move(number: int, by: str) -> Move:
    return Move(number=number, model="m", alias="champion", action="promote", version="1", before=None, by=by, at_ms=1)


def test_a_store_keeps_the_journals_of_its_models(root: str):
    assert Journals(root).models() == []
    journal = Journals(root).of("a b")
    assert journal.moves() == []
    assert journal.append(move(1, "anna"))
    assert not journal.append(move(1, "anna")), "the same move by another process"
    [made] = Journals(root).of("a b").moves()
    assert made == move(1, "anna")
    assert not journal.applied(made)
    journal.note_applied(made)
    assert Journals(root).of("a b").applied(made)
    assert Journals(root).models() == ["a b"]


@pytest.mark.parametrize("name", ["arithmetic", "a b/c", "..", "é=1", "A.b-c_d"])
def test_every_model_name_has_a_folder_of_its_own(root: str, name: str):
    folder = folder_name(name)
    assert model_name(folder) == name
    assert not set(folder) & set("/.% ")
    Journals(root).of(name).append(move(1, "anna"))
    assert Journals(root).models() == [name]


def test_one_of_eight_makes_each_move(place: Place):
    start, rounds = threading.Barrier(8, timeout=LONG_S), 50

    def write(number: int) -> list[int]:
        journal, won = Journal(place.log("promotions", "m"), "m"), []
        for page in range(1, rounds + 1):
            start.wait()
            won += [page] if journal.append(move(page, str(number))) else []
        return won

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(write, range(8)))
    moves = Journal(place.log("promotions", "m"), "m").moves()
    assert [found.number for found in moves if found.number in won[int(found.by)]] == list(range(1, rounds + 1))
    assert sum(map(len, won)) == rounds
