"""Addresses of servers and databases as people see them."""

from __future__ import annotations

import pytest

from infra.mlflow.client import without_password


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("sqlite:////home/me/mlflow.db", "sqlite:////home/me/mlflow.db"),
        ("http://127.0.0.1:5000", "http://127.0.0.1:5000"),
        ("http://ann:secret@host:5000/path", "http://ann:***@host:5000/path"),
        ("postgresql://ann:s@cret@host/db?x=a@b", "postgresql://ann:***@host/db?x=a@b"),
        ("postgresql://ann@host/db", "postgresql://ann@host/db"),
        ("postgresql://ann:se/cret@host/db", "postgresql://ann:***@host/db"),
        ("postgresql://host/db?user=ann&password=secret&a=b", "postgresql://host/db?user=ann&password=***&a=b"),
        ("https://hf_token@mirror/api", "https://***@mirror/api"),
        ("http://host:80 is not what me@there says", "http://host:80 is not what me@there says"),
    ],
)
def test_no_password_and_no_token_is_shown(uri: str, shown: str) -> None:
    assert without_password(uri) == shown
