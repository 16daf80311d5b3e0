"""A Prefect server that asks for a login: what the user is told, and what nobody is."""

from __future__ import annotations

import http.server
import os
from collections.abc import Callable, Iterator
from contextvars import Context

import httpx
import pytest
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from infra.prefect_server import PrefectServerError
from tasks.prefect.environment import prepare
from tasks.prefect.server import configured_url, no_answer, page_url, prefect_api, require_answer
from tests.http_server import serving
from tests.ports import free_port


class Guarded(http.server.BaseHTTPRequestHandler):
    """Healthy for everyone, anything else only for one login; as Prefect's server with an auth string is."""

    def do_GET(self) -> None:
        welcome = self.path == "/api/health" or self.headers.get("Authorization") == "Basic YWRtaW46cmlnaHQ="
        self.send_response(200 if welcome else 401)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(b'"3.7.7"' if welcome else b"{}")

    def log_message(self, format: str, *words: object) -> None:
        """Quiet."""


@pytest.fixture
def url() -> Iterator[str]:
    with serving(Guarded) as address:
        yield f"{address}/api"


def alone(url: str, login: str | None, call: Callable[[], None]) -> None:
    """As a process of its own would call it: without the client and the settings of other tests' server."""
    settings = {PREFECT_API_URL: url, **({PREFECT_API_AUTH_STRING: login} if login else {})}

    def called() -> None:
        with temporary_settings(settings):
            call()

    Context().run(called)


def test_the_right_login_comes_in(url: str):
    alone(url, "admin:right", lambda: require_answer(url))


@pytest.mark.parametrize("login", ["admin:wrong", None])
def test_a_wrong_login_or_none_is_an_error_that_names_the_remedy(url: str, login: str | None):
    with pytest.raises(PrefectServerError, match=r"refuses us \(401\).*PREFECT_API_AUTH_STRING") as refused:
        alone(url, login, lambda: require_answer(url))
    assert "wrong" not in str(refused.value)


def test_a_password_in_the_address_is_not_shown():
    url = f"http://admin:hidden-one@127.0.0.1:{free_port()}/api"
    with pytest.raises(PrefectServerError, match="no Prefect server answers") as refused:
        alone(url, None, lambda: require_answer(url))
    assert "hidden-one" not in str(refused.value)
    shown: list[str | None] = []
    alone(url, None, lambda: shown.append(page_url()))
    assert "hidden-one" not in str(shown[0])


class Failing(Guarded):
    """In front of a server that is away, or asks for another login."""

    def do_GET(self) -> None:
        self.send_response(503 if self.path == "/api/health" else 401)
        self.end_headers()


def test_nor_is_one_in_what_the_client_says_of_its_address():
    with serving(Failing) as address:
        url = f"{address.replace('://', '://admin:hidden-one@')}/api"
        with pytest.raises(PrefectServerError, match=r"no Prefect server answers .*admin:\*\*\*@.*503") as refused:
            alone(url, None, lambda: require_answer(url))
        assert "hidden-one" not in str(refused.value)
        error = httpx.HTTPError(f"Client error '401 Unauthorized' for url '{url}/flows'")
        said = list[str]()
        alone(url, None, lambda: said.append(no_answer(error)))
    assert "hidden-one" not in said[0]
    assert "401 Unauthorized" in said[0]


class Page(http.server.BaseHTTPRequestHandler):
    """Prefect's UI: whatever is asked for, the page."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!DOCTYPE html>")

    def log_message(self, format: str, *words: object) -> None:
        """Quiet."""


def test_an_address_without_api_is_told():
    with serving(Page) as address, pytest.raises(PrefectServerError) as refused:
        alone(f"{address}/", None, lambda: require_answer(f"{address}/"))
    assert str(refused.value) == f"what answers at {address} is not Prefect's API: did you mean {address}/api?"


def test_a_proxy_is_not_asked_for_a_server_on_this_machine(url: str, monkeypatch: pytest.MonkeyPatch):
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "")

    def called() -> None:
        with prefect_api():
            assert configured_url() == url

    alone(url, "admin:right", called)
    monkeypatch.setenv("NO_PROXY", "")
    prepare()  # as every command does, for MLflow's client too
    assert os.environ["NO_PROXY"] == "127.0.0.1,localhost"
