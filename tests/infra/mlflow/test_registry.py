from __future__ import annotations

from pathlib import Path

import pytest

from infra.mlflow.client import open_client
from infra.mlflow.registry import RegistryError, aliases_of, point_alias, register, resolve

LINEAGE = {"ppoflow.digest": "abc", "ppoflow.run": "demo"}


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('registry')}/mlflow.db"


def test_a_version_points_to_the_artifact_and_carries_its_lineage(uri: str) -> None:
    made = register(
        uri, name="m", source="file:///store/a/policy", tags=LINEAGE, aliases=["best", "run-1"], description="why"
    )
    assert (made.name, made.version, made.source) == ("m", "1", "file:///store/a/policy")
    stored = open_client(uri).get_model_version("m", "1")
    assert stored.tags.items() >= LINEAGE.items()
    assert stored.description == "why"
    assert resolve(uri, "models:/m@best") == resolve(uri, "models:/m/1") == "file:///store/a/policy"


def test_who_asks_for_aliases_where_nothing_was_registered_leaves_no_database(tmp_path: Path) -> None:
    file = tmp_path / "mlflow.db"
    with pytest.raises(RegistryError, match=r"models:/m is not there, .* no MLflow database .*: set PPOFLOW_HOME, or"):
        aliases_of(f"sqlite:///{file}", "m")
    assert not file.exists()


def test_the_same_source_and_digest_register_once(uri: str) -> None:
    first = register(uri, name="once", source="file:///a", tags=LINEAGE, aliases=["best"])
    other = register(uri, name="once", source="file:///b", tags={"ppoflow.digest": "other"}, aliases=["best"])
    again = register(uri, name="once", source="file:///a", tags=LINEAGE, aliases=["best"])
    assert (first.version, other.version, again.version) == ("1", "2", "1")


def test_an_alias_goes_back_to_no_older_version_when_that_is_registered_again(uri: str) -> None:
    for run in "aba":
        tags = {"ppoflow.digest": run, "ppoflow.run": run}
        register(uri, name="again", source=f"file:///{run}", tags=tags, aliases=["candidate"])
    assert aliases_of(uri, "again") == {"candidate": "2"}


def test_a_run_whose_best_policy_is_an_older_one_again_points_to_that(uri: str) -> None:
    for policy in "aba":
        tags = {"ppoflow.digest": policy, "ppoflow.run": "demo"}
        register(uri, name="rerun", source=f"file:///{policy}", tags=tags, aliases=["candidate"])
    assert aliases_of(uri, "rerun") == {"candidate": "1"}


@pytest.mark.parametrize("left", [None, "1"])
def test_an_alias_follows_where_whoever_made_its_version_died_before_it_did(uri: str, left: str | None) -> None:
    name = f"died-{left}"
    for run in "ab":
        register(uri, name=name, source=f"file:///{run}", tags={"ppoflow.digest": run})
    if left is not None:
        point_alias(uri, name, "candidate", left)
    register(uri, name=name, source="file:///b", tags={"ppoflow.digest": "b"}, aliases=["candidate"])
    assert aliases_of(uri, name) == {"candidate": "2"}


@pytest.mark.parametrize("alias", ["latest", "v3", "a b", ""])
def test_a_reserved_alias_is_refused_before_anything_is_registered(uri: str, alias: str) -> None:
    with pytest.raises(ValueError, match="is not allowed"):
        register(uri, name="refused", source="file:///a", tags=LINEAGE, aliases=[alias])
    assert [model.name for model in open_client(uri).search_registered_models() if model.name == "refused"] == []


def test_tags_must_name_the_digest(uri: str) -> None:
    with pytest.raises(ValueError, match=r"do not name 'ppoflow\.digest'"):
        register(uri, name="m", source="file:///a", tags={"x": "y"})


@pytest.mark.parametrize("model", ["m", "models:/m", "models:/m@", "models:/m/latest", "runs:/m/1"])
def test_resolve_says_how_a_model_is_written(uri: str, model: str) -> None:
    with pytest.raises(ValueError, match="models:/NAME@ALIAS or models:/NAME/VERSION"):
        resolve(uri, model)


def test_what_cannot_be_uploaded_is_an_error_of_the_registry(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the client of the store raises that a server has named for its runs' artifacts."""
    client = open_client(uri)
    run = client.create_run(client.create_experiment("uploads", artifact_location=str(tmp_path))).info.run_id
    (tmp_path / "config.json").write_text("{}")

    def outside(*_: object, **__: object) -> None:
        from mlflow.exceptions import MlflowException
        from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE

        raise MlflowException("Invalid model version source", INVALID_PARAMETER_VALUE)

    def without_keys(*_: object) -> None:
        raise RuntimeError("Unable to locate credentials")

    monkeypatch.setattr(type(client), "create_model_version", outside)
    monkeypatch.setattr(type(client), "log_artifacts", without_keys)
    with pytest.raises(RegistryError, match=r"could not be uploaded .*Unable to locate credentials.*--serve-"):
        register(uri, name="up", source=tmp_path.as_uri(), tags=LINEAGE, run_id=run)


@pytest.mark.parametrize("model", ["models:/nowhere/1", "models:/nowhere@best"])
def test_resolve_of_an_unknown_model_is_a_clear_error(uri: str, model: str) -> None:
    with pytest.raises(RegistryError, match=f"could not find {model}"):
        resolve(uri, model)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("models:/there@best", r"there has no alias best \(its aliases: @first is version 1, @last is version 2\)$"),
        ("models:/there/7", r"there has no version 7 \(its aliases: @first is version 1, @last is version 2\)$"),
        ("models:/their@best", r"no model is registered as their \(registered: .*there.*\)$"),
    ],
)
def test_what_is_not_there_is_told_with_what_there_is(uri: str, model: str, message: str) -> None:
    for source, alias in (("file:///a", "first"), ("file:///b", "last")):
        register(uri, name="there", source=source, tags={"ppoflow.digest": source}, aliases=[alias])
    with pytest.raises(RegistryError, match=message):
        resolve(uri, model)


def test_an_unreachable_server_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match=r"MLflow at http://127\.0\.0\.1:9 could not register"):
        register("http://127.0.0.1:9", name="m", source=tmp_path.as_uri(), tags=LINEAGE)


def test_to_look_for_a_model_makes_no_database(tmp_path: Path) -> None:
    file = tmp_path / "typo" / "mlflow.db"
    with pytest.raises(
        RegistryError, match=r"models:/policy/1 is not there, for there is no MLflow database .*/typo/m"
    ):
        resolve(f"sqlite:///{file}", "models:/policy/1")
    assert not file.parent.exists()
