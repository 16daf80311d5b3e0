"""Aliases move only from where the mover believes they stand, on a real registry, with every move on record."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier

import pytest

from infra.artifacts.manifest import ArtifactRef
from infra.backend import open_log
from infra.mlflow.alias import Alias, AliasMoved, NothingBefore, Reason, Standing, describe_move
from infra.mlflow.alias_journal import PROMOTIONS, Journal, Journals, folder_name
from infra.mlflow.client import open_client
from infra.mlflow.registry import RegistryError, aliases_of, point_alias
from infra.runs.checksummed_json import RecordCorrupted
from infra.storage.write_once import WriteOnceLog

ANNA, BEN = Reason("anna", "it is better", {"gain": 0.1}), Reason("ben")


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('registry')}/mlflow.db"


@pytest.fixture
def model(uri: str, request: pytest.FixtureRequest) -> str:
    """A model of the test's own, with nine versions."""
    name, client = f"m {request.node.name}", open_client(uri)
    client.create_registered_model(name)
    for number in range(1, 10):
        client.create_model_version(name, f"file:///{number}")
    return name


class Registry:
    """A model's alias `champion`, as each process sees it that works on the store."""

    def __init__(self, uri: str, root: Path, model: str) -> None:
        self.uri, self.root, self.model = uri, root, model
        self.pauses: list[float] = []

    def journal(self) -> Journal:
        return Journals(str(self.root)).of(self.model)

    def alias(self, name: str = "champion", uri: str | None = None) -> Alias:
        return Alias(uri or self.uri, self.journal(), name, pause=self.pauses.append)

    def points_to(self) -> str | None:
        return aliases_of(self.uri, self.model).get("champion")

    def move(self, version: str) -> None:
        alias = self.alias()
        alias.move(alias.standing(), version, "promote", ANNA)

    def told(self) -> list[tuple[int, str, str | None, str | None]]:
        return [(move.number, move.action, move.before, move.version) for move in self.journal().moves()]


@pytest.fixture
def registry(uri: str, tmp_path: Path, model: str) -> Registry:
    return Registry(uri, tmp_path, model)


def test_a_move_is_recorded_and_mlflow_follows(registry: Registry) -> None:
    alias = registry.alias()
    assert alias.standing() == Standing(None, 0)
    ref = ArtifactRef(kind="evaluation", uri="file:///e", digest="ab")
    made = alias.move(alias.standing(), "3", "promote", Reason("anna", "first", {"gain": 0.5}, [ref]))
    assert registry.points_to() == "3"
    assert registry.journal().moves() == [made]
    assert (made.number, made.before, made.version, made.by, made.evidence) == (1, None, "3", "anna", {"gain": 0.5})
    assert made.artifacts == (ref,)
    assert "promote of version 3 in place of no version by anna" in describe_move(made)
    assert alias.standing() == Standing("3", 1)


def test_of_eight_at_once_one_wins_and_seven_say_why_not(registry: Registry) -> None:
    registry.move("9")
    aliases = [registry.alias() for _ in range(8)]
    standing = aliases[0].standing()
    together = Barrier(8)

    def promote(number: int) -> str:
        together.wait()
        try:
            aliases[number].move(standing, str(number + 1), "promote", Reason(f"mover {number + 1}"))
        except AliasMoved as error:
            return str(error)
        return f"won {number + 1}"

    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(promote, range(8)))
    [winner] = [outcome.removeprefix("won ") for outcome in outcomes if outcome.startswith("won")]
    assert registry.points_to() == winner
    assert registry.told() == [(1, "promote", None, "9"), (2, "promote", "9", winner)]
    lost = [outcome for outcome in outcomes if not outcome.startswith("won")]
    assert len(lost) == 7
    for message in lost:
        assert "pointed to version 9 when the comparison started" in message
        assert f"promote of version {winner} in place of version 9 by mover {winner}" in message


class Followed:
    """A journal's pages; somebody else acts as soon as they were listed once."""

    def __init__(self, pages: WriteOnceLog, act: Callable[[], None]) -> None:
        self.pages, self.create, self.read = pages, pages.create, pages.read
        self.folders, self.below = pages.folders, pages.below
        self.acts = [act]

    def names(self) -> list[str]:
        listed = self.pages.names()
        while self.acts:
            self.acts.pop()()
        return listed


def test_one_that_moves_while_another_looks_is_named_as_the_mover(registry: Registry) -> None:
    registry.move("1")
    standing = registry.alias().standing()
    pages = open_log(str(registry.root), PROMOTIONS).below(folder_name(registry.model))
    journal = Journal(Followed(pages, lambda: registry.move("2")), registry.model)
    with pytest.raises(AliasMoved, match="move 2: promote of version 2 in place of version 1 by anna"):
        Alias(registry.uri, journal, "champion").move(standing, "3", "promote", BEN)
    assert registry.points_to() == "2"


def test_an_alias_that_moved_there_and_back_has_moved(registry: Registry) -> None:
    registry.move("1")
    before = registry.alias().standing()
    registry.move("2")
    registry.move("1")
    with pytest.raises(AliasMoved, match="move 3: promote of version 1"):
        registry.alias().move(before, "5", "promote", BEN)


def test_aliases_of_one_model_share_the_journal_and_do_not_hinder_each_other(registry: Registry) -> None:
    alias = registry.alias()
    before = alias.standing()
    other = registry.alias("shadow")
    other.move(other.standing(), "4", "promote", BEN)
    alias.move(before, "1", "promote", ANNA)
    assert aliases_of(registry.uri, registry.model) == {"champion": "1", "shadow": "4"}
    assert [move.alias for move in registry.journal().moves()] == ["shadow", "champion"]


def test_what_somebody_moved_in_mlflow_itself_is_noticed_and_written_down(registry: Registry) -> None:
    registry.move("1")
    before = registry.alias().standing()
    point_alias(registry.uri, registry.model, "champion", "7")
    with pytest.raises(AliasMoved, match="was moved to version 7 in MLflow itself since"):
        registry.alias().move(before, "2", "promote", BEN)
    assert registry.alias().standing() == Standing("7", 2)
    point_alias(registry.uri, registry.model, "champion", None)
    assert registry.alias().standing() == Standing(None, 3)
    assert registry.told()[1:] == [(2, "found", "1", "7"), (3, "found", "7", None)]
    assert registry.pauses == [2.0, 2.0, 2.0]


def test_an_alias_from_before_the_journal_is_its_first_page(registry: Registry) -> None:
    point_alias(registry.uri, registry.model, "champion", "6")
    assert registry.alias().standing() == Standing("6", 1)
    assert registry.told() == [(1, "found", None, "6")]


def test_a_mover_that_died_between_page_and_alias_has_moved_it(registry: Registry) -> None:
    registry.move("1")
    with pytest.raises(RegistryError, match="MLflow"):
        registry.alias(uri="http://127.0.0.1:9").move(Standing("1", 1), "2", "promote", ANNA)
    assert registry.told() == [(1, "promote", None, "1")]  # it could not even look
    move = registry.journal().moves()[0].model_copy(update={"number": 2, "before": "1", "version": "2"})
    assert registry.journal().append(move)
    assert registry.points_to() == "1"
    with pytest.raises(AliasMoved, match="move 2"):
        registry.alias().move(Standing("1", 1), "3", "promote", BEN)
    assert registry.alias().standing() == Standing("2", 2)
    assert registry.points_to() == "2"
    assert registry.pauses == []


def test_a_move_is_not_repeated_over_a_later_one_where_its_mover_died_before_it_was_noted(registry: Registry) -> None:
    registry.move("1")
    move = registry.journal().moves()[0].model_copy(update={"number": 2, "before": "1", "version": "2"})
    assert registry.journal().append(move)
    point_alias(registry.uri, registry.model, "champion", "2")
    assert registry.alias().standing() == Standing("2", 2)
    point_alias(registry.uri, registry.model, "champion", "4")
    assert registry.alias().standing() == Standing("4", 3)
    assert registry.points_to() == "4"
    assert registry.told()[2:] == [(3, "found", "2", "4")]


def test_a_version_that_was_deleted_is_not_moved_to(registry: Registry) -> None:
    registry.move("1")
    open_client(registry.uri).delete_model_version(registry.model, "9")
    with pytest.raises(RegistryError, match="has no version 9 in MLflow any more, so champion is not moved to it"):
        registry.move("9")
    registry.move("2")
    assert registry.told() == [(1, "promote", None, "1"), (2, "promote", "1", "2")]


def test_one_that_is_deleted_while_it_is_moved_to_is_no_success(registry: Registry) -> None:
    registry.move("1")
    standing = registry.alias().standing()
    pages = open_log(str(registry.root), PROMOTIONS).below(folder_name(registry.model))
    delete = partial(open_client(registry.uri).delete_model_version, registry.model, "9")
    journal = Journal(Followed(pages, delete), registry.model)
    with pytest.raises(RegistryError, match="has no version 9 in MLflow any more"):
        Alias(registry.uri, journal, "champion").move(standing, "9", "promote", BEN)
    assert registry.alias().standing() == Standing("1", 3)
    assert registry.told()[1:] == [(2, "promote", "1", "9"), (3, "found", "9", "1")]


def test_going_back_passes_versions_that_were_deleted(registry: Registry) -> None:
    for version in "123":
        registry.move(version)
    open_client(registry.uri).delete_model_version(registry.model, "2")
    assert registry.alias().before() == "1"
    open_client(registry.uri).delete_model_version(registry.model, "3")  # the alias goes with it
    assert registry.alias().standing() == Standing(None, 4)
    assert registry.alias().before() == "1"
    open_client(registry.uri).delete_model_version(registry.model, "1")
    with pytest.raises(NothingBefore, match=r"name one: ppoflow rollback .* --alias champion --to VERSION"):
        registry.alias().before()


def test_one_that_is_deleted_before_the_alias_follows_leaves_it_where_it_is(registry: Registry) -> None:
    """MLflow was away when the move was put on record."""
    registry.move("1")
    registry.move("2")
    page = registry.journal().moves()[1].model_copy(update={"number": 3, "before": "2", "version": "9"})
    assert registry.journal().append(page)
    open_client(registry.uri).delete_model_version(registry.model, "9")
    assert registry.alias().standing() == Standing("2", 4)
    assert registry.told()[2:] == [(3, "promote", "2", "9"), (4, "found", "9", "2")]
    assert registry.journal().moves()[3].reason == "version 9 was deleted in MLflow before it followed"
    assert registry.alias().before() == "1"
    registry.move("3")
    assert registry.points_to() == "3"


def test_going_back_follows_the_history_without_what_was_rolled_back(registry: Registry) -> None:
    alias = registry.alias()
    with pytest.raises(NothingBefore, match=r"has no version to go back to: its history has 0 step\(s\); name one: "):
        alias.before()
    for version in "123":
        registry.move(version)
    for expected in "21":
        assert alias.before() == expected
        alias.move(alias.standing(), alias.before(), "rollback", ANNA)
    with pytest.raises(NothingBefore, match="1 step"):
        alias.before()
    registry.move("8")
    assert alias.before() == "1"
    assert registry.points_to() == "8"


def test_going_back_twice_passes_a_version_that_was_there_before_once(registry: Registry) -> None:
    alias = registry.alias()
    for version in "51213":
        registry.move(version)
    for expected in "1215":
        assert alias.before() == expected
        alias.move(alias.standing(), alias.before(), "rollback", ANNA)


@pytest.mark.parametrize("cut", [0, 1, -2])
def test_a_damaged_page_stops_everything_and_says_so(cut: int, registry: Registry) -> None:
    registry.move("1")
    [page] = registry.root.rglob("*.json")
    content = bytearray(page.read_bytes())
    page.chmod(0o644)
    page.write_bytes(content[:cut] if cut <= 0 else content.replace(b"anna", b"anne"))
    with pytest.raises(RecordCorrupted, match=r"page 000001\.json of the promotions .* is damaged"):
        registry.alias().standing()


def test_a_model_that_is_not_registered_is_a_clear_error(uri: str, tmp_path: Path) -> None:
    open_client(uri)
    with pytest.raises(RegistryError, match="could not read the aliases of 'nothing'"):
        Registry(uri, tmp_path, "nothing").alias().standing()
