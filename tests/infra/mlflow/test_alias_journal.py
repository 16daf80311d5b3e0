"""The journal of a model's aliases: numbered moves, each written once, in any store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infra.mlflow.alias_journal import Journal, Journals, Move, folder_name, model_name
from infra.runs.checksummed_json import RecordCorrupted, encode
from tests.infra.places import Place
from tests.waiting import LONG_S


@pytest.fixture(params=["folder", "S3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of an empty store."""
    return str(tmp_path) if request.param == "folder" else f"s3://{request.getfixturevalue('bucket')}/team/store"


def move(number: int, by: str, model: str = "m", *, alias: str = "champion", to: str = "1", of: str = "1") -> Move:
    """The move of a page: of an alias that is at version `of` from the second page on."""
    before = None if number == 1 else of
    return Move(number=number, model=model, alias=alias, action="promote", version=to, before=before, by=by, at_ms=1)


def test_a_store_keeps_the_journals_of_its_models(root: str):
    assert Journals(root).models() == []
    journal = Journals(root).of("a b")
    assert journal.moves() == []
    assert journal.append(move(1, "anna", "a b"))
    assert not journal.append(move(1, "anna", "a b")), "the same move by another process"
    [made] = Journals(root).of("a b").moves()
    assert made == move(1, "anna", "a b")
    assert not journal.applied(made)
    journal.note_applied(made)
    assert Journals(root).of("a b").applied(made)
    assert Journals(root).models() == ["a b"]


@pytest.mark.parametrize("name", ["arithmetic", "a b/c", "..", "é=1", "A.b-c_d"])
def test_every_model_name_has_a_folder_of_its_own(root: str, name: str):
    folder = folder_name(name)
    assert model_name(folder) == name
    assert not set(folder) & set("/.% ")
    Journals(root).of(name).append(move(1, "anna", name))
    assert Journals(root).models() == [name]
    assert Journals(root).of(name).moves() == [move(1, "anna", name)]


@pytest.mark.parametrize("folder", ["caf\udcff", "a b", "a=", "a=2", "=41", "a=2f"])
def test_a_folder_that_is_no_models_is_told(tmp_path: Path, folder: str):
    (tmp_path / "promotions" / folder).mkdir(parents=True)
    with pytest.raises(RecordCorrupted, match=r"folder '[ -~]*' among the promotions bears the name of no model"):
        Journals(str(tmp_path)).models()


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


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    """The folder of the journal of m, whose champion went from 1 to 2 to 3; beside it that of other."""
    for model in ("m", "other"):
        journal = Journals(str(tmp_path)).of(model)
        for number in (1, 2, 3):
            made = move(number, "anna", model, to=str(number), of=str(number - 1))
            assert journal.append(made)
            journal.note_applied(made)
    return tmp_path / "promotions/m"


def overwrite(page: Path, content: bytes) -> None:
    """A page is read-only."""
    page.chmod(0o644)
    page.write_bytes(content)


def of_other_model(pages: Path) -> None:
    """Whole, with a checksum that holds."""
    overwrite(pages / "000003.json", (pages.parent / "other/000003.json").read_bytes())


def of_other_place(pages: Path) -> None:
    """Sealed anew under a name that is not its own."""
    overwrite(pages / "000003.json", encode("000003.json", move(2, "anna", to="3", of="2").model_dump(mode="json")))


def from_elsewhere(pages: Path) -> None:
    """Sealed anew, with a predecessor that is none."""
    overwrite(pages / "000003.json", encode("000003.json", move(3, "anna", to="3", of="1").model_dump(mode="json")))


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "first": (lambda pages: (pages / "000001.json").unlink(), "000001.json .* is missing, and later ones are there"),
    "amid": (lambda pages: (pages / "000002.json").unlink(), "000002.json .* is missing, and later ones are there"),
    "last": (lambda pages: (pages / "000003.json").unlink(), "000003.json .* is missing, and later ones are there"),
    "other model": (of_other_model, "000003.json .* is page 3 of model 'other'"),
    "other place": (of_other_place, "000003.json .* is page 2 of model 'm'"),
    "from elsewhere": (from_elsewhere, "000003.json .* moves champion from version 1, and .* moved it to 2"),
    "no move": (lambda pages: overwrite(pages / "000001.json", encode("000001.json", {})), "000001.json .* is damaged"),
    "deep": (lambda pages: overwrite(pages / "000001.json", b"[" * 200_000), "000001.json .* is damaged"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_pages_that_do_not_make_one_history_are_told_with_what_helps(pages: Path, damage: str):
    harm, complaint = DAMAGES[damage]
    harm(pages)
    root = str(pages.parent.parent)
    with pytest.raises(RecordCorrupted, match=rf"page {complaint}.*: bring it back from a copy of the store"):
        Journals(root).of("m").moves()
    assert len(Journals(root).of("other").moves()) == 3


def test_each_alias_has_a_history_of_its_own(tmp_path: Path):
    """And one that is older than the journal begins where it stood."""
    journal = Journals(str(tmp_path)).of("m")
    moves = [move(1, "anna"), move(2, "ben", alias="shadow", to="8", of="7"), move(3, "anna", to="2")]
    assert all(map(journal.append, moves))
    assert journal.append(moves[2].model_copy(update={"number": 4, "before": "2", "version": None, "action": "found"}))
    assert journal.append(moves[2].model_copy(update={"number": 5, "before": None, "version": "4"}))
    assert [made.version for made in Journals(str(tmp_path)).of("m").moves_of("champion")] == ["1", "2", None, "4"]
