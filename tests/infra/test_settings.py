"""Settings come from the environment, have bounds, and change nothing that the user has set."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from infra.settings import Settings, child_environment, engine_environment, export, reward_environment

NAMES = (
    "HOME",
    "STORE",
    "TRACKING_URI",
    "PREFECT_API_URL",
    "ENGINE_THREADS",
    "CACHE",
    "CACHE_GIB",
    "REWARD_ENV",
    "ENGINE_WAIT_POLICY",
)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (*(f"PPOFLOW_{name}" for name in NAMES), "MLFLOW_TRACKING_URI", "PREFECT_API_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def test_defaults_lie_in_one_folder(tmp_path: Path):
    settings, home = Settings(), tmp_path / ".ppoflow"
    assert (settings.home, settings.store_root) == (home, str(home / "store"))
    assert settings.tracking_uri == f"sqlite:///{home}/mlflow/mlflow.db"
    assert (settings.prefect_api_url, settings.engine_threads) == (None, None)
    assert (settings.cache_folder, settings.cache_gib) == (home / "cache", 50)
    assert (settings.prefect_home, settings.mlflow_folder) == (home / "prefect", home / "mlflow")
    assert (settings.run_folder("r"), settings.log_folder("r")) == (home / "runs/r", home / "runs/r/logs")
    assert not home.exists()


def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PPOFLOW_HOME", "state")
    monkeypatch.setenv("PPOFLOW_ENGINE_THREADS", "3")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow")
    monkeypatch.setenv("PREFECT_API_URL", "http://prefect/api")
    settings = Settings()
    assert settings.store_root == str(tmp_path / "state/store")
    assert settings.engine_threads == 3
    assert (settings.tracking_uri, settings.prefect_api_url) == ("http://mlflow", "http://prefect/api")


def test_our_own_names_come_before_those_of_others(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PPOFLOW_TRACKING_URI", "http://ours")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://theirs")
    assert Settings().tracking_uri == "http://ours"


def test_an_empty_variable_is_not_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PPOFLOW_HOME", "")
    monkeypatch.setenv("PREFECT_API_URL", "")
    assert (Settings().home, Settings().prefect_api_url) == (tmp_path / ".ppoflow", None)


def test_stores_are_addresses_or_absolute_folders(tmp_path: Path):
    assert Settings(store="mine").store_root == str(tmp_path / "mine")
    assert Settings(store="s3://bucket/x").store_root == "s3://bucket/x"
    assert Settings(cache=Path("copies")).cache_folder == tmp_path / "copies"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PPOFLOW_ENGINE_THREADS", "0"),
        ("PPOFLOW_ENGINE_THREADS", "many"),
        ("PPOFLOW_CACHE_GIB", "0"),
        ("PPOFLOW_REWARD_URLS", "rewards:8100"),
        ("PPOFLOW_REWARD_URLS", "http://rewards/score"),
        ("PPOFLOW_REWARD_URLS", "http://me:secret@rewards"),
        ("PPOFLOW_REWARD_URLS", "http://rewards:port"),
        ("PREFECT_API_URL", "localhost:4200"),
        ("PREFECT_API_URL", "http://localhost:99999/api"),
        ("PREFECT_API_URL", "http://localhost:port/api"),
        ("PREFECT_API_URL", "http:///api"),
        ("PPOFLOW_TRACKING_URI", "localhost:5000"),
        ("PPOFLOW_TRACKING_URI", "http://localhost:99999"),
        ("PPOFLOW_REWARD_ENV", "JUDGE_KEY=1"),
        ("PPOFLOW_REWARD_ENV", "JUDGE_KEY,,X"),
        ("PPOFLOW_REWARD_ENV", "*"),
    ],
)
def test_values_out_of_bounds_are_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValidationError, match=f"(?i){name.removeprefix('PPOFLOW_')}"):
        Settings()


def test_a_run_cannot_leave_the_folder():
    with pytest.raises(ValueError, match="run name"):
        Settings().log_folder("../x")


def test_every_setting_says_what_it_is():
    for name, field in Settings.model_fields.items():
        assert (field.description or "").endswith("."), name


def test_a_child_gets_ours_and_more(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MINE", "1")
    assert {"MINE": "2", "NEW": "3"}.items() <= child_environment({"MINE": "2", "NEW": "3"}).items()
    assert os.environ["MINE"] == "1"
    assert child_environment({})["MINE"] == "1"


def test_the_owner_names_what_reward_functions_see(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JUDGE_KEY", "1")
    monkeypatch.setenv("PPOFLOW_REWARD_ENV", "JUDGE_KEY, NOT_SET")
    names = Settings().reward_env
    assert names == ("JUDGE_KEY", "NOT_SET")
    assert reward_environment(names).items() >= {"JUDGE_KEY": "1"}.items()
    assert "NOT_SET" not in reward_environment(names)
    assert "JUDGE_KEY" not in engine_environment({}).keys() | reward_environment(()).keys()
    assert engine_environment({"PATH": "ours"})["PATH"] == "ours"


def test_threads_of_an_engine_soon_sleep_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OPENBLAS_THREAD_TIMEOUT", raising=False)
    assert engine_environment({})["OPENBLAS_THREAD_TIMEOUT"] == "4"
    monkeypatch.setenv("OPENBLAS_THREAD_TIMEOUT", "20")
    assert engine_environment({})["OPENBLAS_THREAD_TIMEOUT"] == "20"


def test_export_leaves_what_the_user_has_set(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PPOFLOW_TEST_SET", "user")
    monkeypatch.setenv("PPOFLOW_TEST_NEW", "to be removed afterwards")
    monkeypatch.delenv("PPOFLOW_TEST_NEW")
    export({"PPOFLOW_TEST_SET": "ours", "PPOFLOW_TEST_NEW": "ours"})
    assert (os.environ["PPOFLOW_TEST_SET"], os.environ.pop("PPOFLOW_TEST_NEW")) == ("user", "ours")
