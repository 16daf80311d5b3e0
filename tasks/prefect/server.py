"""Which Prefect server a flow talks to: the user's, or an embedded one that lives as long as the flow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from http import HTTPStatus
from inspect import signature
from typing import Any, ParamSpec, TypeVar

from httpx import HTTPError
from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import State
from prefect.exceptions import ParameterTypeError, PrefectException, PrefectHTTPStatusError, TerminationSignal
from prefect.logging.handlers import APILogHandler
from prefect.settings import PREFECT_API_URL, PREFECT_UI_URL, temporary_settings
from prefect.states import Crashed, Failed
from prefect.utilities.callables import get_call_parameters
from pydantic import TypeAdapter, ValidationError

from infra.mlflow.client import without_password
from infra.prefect_server import PrefectServer, PrefectServerError
from infra.settings import Settings, reach_directly
from infra.storage.objects import StoreUnavailable
from ppo_core.spec.explaining import requirement
from tasks.prefect.client import short_timeout_client
from tasks.prefect.listening import no_prefect, not_the_api
from tasks.runs.errors import FAILURES, behind

PREFECT_AWAY = (HTTPError, PrefectException)
"""What Prefect's client raises when its server is gone: the run is safe all the same, its records have it."""

START_S = 30.0
"""How long the server may take for its first answer. Asked again, a 503 would keep a start waiting two minutes."""

P = ParamSpec("P")
R = TypeVar("R")


class EmbeddedFlow(Flow[P, R]):
    """A flow that, called where no Prefect server is configured, brings its own. Workers never come through there.

    `check` gets the flow's parameters and refuses what cannot run, before that. A store that has stopped to answer ends
    the flow as Crashed, not as Failed: an automation starts such a flow run again.
    """

    def __init__(self, fn: Callable[P, R], *, check: Callable[..., object] | None = None, **options: Any) -> None:
        super().__init__(fn=fn, **options)
        self.fn = ending_plainly(fn)
        self._check = check

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._check is not None:
            self._check(**self.validate_parameters(get_call_parameters(self.fn, args, kwargs)))
        return self.checked(*args, **kwargs)

    def checked(self, *args: Any, **kwargs: Any) -> Any:
        """Call the flow where its check was done already."""
        with prefect_api():
            return super().__call__(*args, **kwargs)

    def validate_parameters(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """With their types, defaults left out; ParameterTypeError says what is wrong in a line for each problem."""
        expected = signature(self.fn).parameters
        for name in expected.keys() & parameters.keys():
            try:
                TypeAdapter(expected[name].annotation).validate_python(parameters[name])
            except ValidationError as error:  # Prefect would log all parameters with it
                raise ParameterTypeError("\n".join(problems(name, error))) from None
        return super().validate_parameters(parameters)


def problems(parameter: str, error: ValidationError) -> list[str]:
    """A line for each value that is refused: where it is (keys of a spec as in its file), and why."""
    lines = []
    for item in error.errors():
        place = item["loc"] if parameter == "spec" else (parameter, *item["loc"])
        where = ".".join(str(part) for part in place)
        given = "" if item["type"] in ("value_error", "missing") else f"={item['input']!r}"
        lines.append(f"{where}{given}: {requirement(item)}" if where else requirement(item))
    return lines


def ending_plainly(function: Callable[P, R]) -> Callable[P, R]:
    """The function, which gives Prefect's state `Crashed` where the store does not answer any more, and `Failed` for
    other errors that people are told without a traceback. An error that Prefect made of a signal is that signal again.

    Whoever calls the flow gets the error out of the state, as if it had been raised.
    """

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> Any:
        try:
            return function(*args, **kwargs)
        except StoreUnavailable as error:
            state: State[Any] = Crashed(message=f"StoreUnavailable: {error}", data=error)
            return state
        except FAILURES as error:
            failed: State[Any] = Failed(message=f"{type(error).__name__}: {error}", data=error)
            return failed
        except Exception as error:
            # Where a signal comes while Prefect makes a task run, its own handling fails with another error.
            signal = behind(error, TerminationSignal, KeyboardInterrupt)
            if signal is None:
                raise
            raise signal from error

    # Prefect looks for the types of parameters in the module of the function that it is given.
    called.__signature__ = signature(function, eval_str=True)  # type: ignore[attr-defined]
    return called


@contextmanager
def prefect_api() -> Iterator[None]:
    """Have a server for the calls inside: the configured one, else a child of ours with its page open meanwhile.

    A proxy, which Prefect's and MLflow's clients would ask, knows nothing of servers on this machine.
    """
    reach_directly()
    configured = configured_url()
    if configured:
        known = PREFECT_API_URL.value() == configured
        with nullcontext() if known else temporary_settings({PREFECT_API_URL: configured}):
            require_answer(configured)
            yield
        return
    server = PrefectServer(Settings().prefect_home)
    server.start()
    try:
        server.wait_until_healthy()
        with temporary_settings({PREFECT_API_URL: server.api_url, PREFECT_UI_URL: server.ui_url}):
            try:
                yield
            finally:
                APILogHandler().flush()  # what the server has not got by now it never will
    finally:
        server.close()


def require_answer(url: str) -> None:
    """Raise PrefectServerError where no server answers at `url`."""
    with short_timeout_client(START_S) as client:
        error = client.api_healthcheck()
        if error is None:
            _require_welcome(client, url)
    if error is not None:
        raise no_prefect(url, error)


def _require_welcome(client: SyncPrefectClient, url: str) -> None:
    """Its health it tells everyone; anything else only those who name the password."""
    try:
        client.api_version()
    except ValueError:  # a page, and no JSON
        raise not_the_api(url) from None
    except PrefectHTTPStatusError as refused:
        if refused.response.status_code == HTTPStatus.NOT_FOUND:
            raise not_the_api(url) from None
        if refused.response.status_code not in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            raise
        raise PrefectServerError(
            f"the Prefect server at {without_password(url)} refuses us ({refused.response.status_code}): put its "
            "login, user:password, into PREFECT_API_AUTH_STRING"
        ) from None


def configured_url() -> str | None:
    """The API of the user's own server: from ppoflow's settings, or from Prefect's (environment or profile)."""
    return Settings().prefect_api_url or PREFECT_API_URL.value()


def shown_url() -> str:
    """The API that flows talk to, for messages."""
    return without_password(configured_url() or "the embedded server")


def no_answer(error: Exception) -> str:
    """The message about that API where a call to it fails; a password in the error's address is masked too."""
    return f"Prefect's server at {shown_url()} fails or does not answer ({without_password(str(error))})"


def page_url() -> str | None:
    """Where the Prefect page is; None where there is no server now."""
    page = PREFECT_UI_URL.value() or (configured_url() or "").removesuffix("/api")
    return without_password(str(page)) or None
