"""How commands talk to people: plain text, errors as messages, and what an interrupted flow leaves."""

from __future__ import annotations

import errno
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from types import FrameType
from typing import NoReturn

import typer
from rich.console import Console

from flows.starting import begin

REFUSED, INTERRUPTED, BROKEN, NO_READER = 2, 130, 70, 141
"""Exit statuses: a message says what is wrong; Ctrl-C; an error that nobody has foreseen, with its traceback; nobody
reads the output, as SIGPIPE would say. 1 is a verdict: something differs, is damaged, or was not promoted."""
LEAVE_S, AGAIN_S = 15.0, 0.05
OF_THE_SYSTEM = {
    **dict.fromkeys((errno.EACCES, errno.EPERM), "give this user access to it"),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room there"),
    errno.EROFS: "its file system is mounted read-only: mount it for writing, or choose another folder",
    errno.EIO: "its disk fails: copy what can be read, and look with `ppoflow fsck`",
}
"""What helps where the operating system refuses a file; no traceback says more."""


@contextmanager
def ending_well(again: str) -> Iterator[None]:
    """Around a flow that goes on where it stopped, by the command `again`: what people are told where it is cut off."""
    from tasks.prefect.server import PREFECT_AWAY, no_answer
    from tasks.runs.errors import EngineError, StoreUnavailable

    try:
        with stopping_on_sigterm():
            yield
    except KeyboardInterrupt:
        say(f"interrupted; finished work is kept; continue with  {again}")
        raise typer.Exit(INTERRUPTED) from None
    except PREFECT_AWAY as error:
        say(no_answer(error))
        say(f"finished work is kept; continue with  {again}")
        leave(REFUSED)
    except (EngineError, StoreUnavailable):
        say(f"finished work is kept; continue with  {again}")
        raise


@contextmanager
def friendly_errors(starting: str | None = None) -> Iterator[None]:
    """Show what went wrong as a message, not as a traceback; the exit status is 2.

    `starting` is what a command that takes time says first.
    """
    if starting is not None:
        begin(starting)
    try:
        quiet_prefect()  # before anything imports it
        from tasks.runs.errors import FAILURES
        from tasks.runs.state_folder import require_readable_state, unknown_variables

        try:
            require_readable_state()
            for line in unknown_variables():
                print(f"! {line}", file=sys.stderr)
            with unwrapped_interrupts():
                yield
        except FAILURES as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            raise typer.Exit(REFUSED) from None
        except OSError as error:
            if error.filename is None or error.errno not in OF_THE_SYSTEM:
                raise
            remedy = OF_THE_SYSTEM[error.errno]
            print(f"{error.filename}: {error.strerror}: {remedy}", file=sys.stderr)
            raise typer.Exit(REFUSED) from None
        except Exception as error:
            if not is_prefect_away(error):
                raise
            from tasks.prefect.server import no_answer

            print(no_answer(error), file=sys.stderr)
            leave(REFUSED)
    except KeyboardInterrupt:
        say("interrupted")
        raise typer.Exit(INTERRUPTED) from None


def is_prefect_away(error: Exception) -> bool:
    """Whether Prefect's client raises this when its server is gone; commands that need none do not import it."""
    return "httpx" in sys.modules and isinstance(error, sys.modules["httpx"].HTTPError)


def say(text: str) -> None:
    """A text as it is, :x: too."""
    Console(emoji=False).print(text, highlight=False, markup=False, soft_wrap=True)


def leave(status: int) -> NoReturn:
    """End at once: what waits to be told to a server that is gone would hold the process for minutes."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(status)


@contextmanager
def no_verdict_by_accident() -> Iterator[None]:
    """Around a whole command: status 1 is a verdict, so what nobody has foreseen ends it with another one.

    Where nothing can be written to the output any more, as on a full disk, a line says so.
    """
    try:
        yield
    except SystemExit as end:
        # typer ends with 1 where nobody reads its output, or answers its question.
        if end.code == 1 and isinstance(end.__context__, OSError | typer.Abort):
            raise SystemExit(INTERRUPTED if isinstance(end.__context__, typer.Abort) else NO_READER) from None
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.filename is None and (why := output_fails()) is not None:
            with suppress(OSError):
                print(f"the output cannot be written: {why}", file=sys.stderr)
            leave(REFUSED)
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(BROKEN) from None


def output_fails() -> str | None:
    """Why nothing can be written to the output now; None where it can."""
    try:
        print(flush=True)  # what was refused before is not kept
    except OSError as error:
        return error.strerror
    return None


@contextmanager
def leaving_soon(within_s: float = LEAVE_S) -> Iterator[None]:
    """Around a whole command: where it was interrupted, it ends at once after that time.

    What Prefect has not told its server yet may keep the process for minutes at its end.
    """
    try:
        yield
    except SystemExit as end:
        if end.code == INTERRUPTED:
            last = threading.Timer(within_s, leave, (INTERRUPTED,))
            last.daemon = True
            last.start()
        raise


def command_line(*arguments: str) -> str:
    """`ppoflow …` as it can be pasted."""
    return shlex.join(["ppoflow", *arguments])


def set_options(overrides: list[str] | None) -> list[str]:
    """`--set` options as they were given; of one key the last one counts, and stands alone."""
    last = {text.partition("=")[0]: text for text in overrides or []}
    return [part for text in last.values() for part in ("--set", text)]


def folder_option(folder: str | None) -> list[str]:
    """`--folder` as it was given: records have the folder in which a run began."""
    return [] if folder is None else ["--folder", folder]


def with_set(command: str, override: str) -> str:
    """A command line with this `--set` option, in place of any other for its key."""
    words = shlex.split(command)
    given = [text for flag, text in pairwise(words) if flag == "--set"]
    plain = words[: words.index("--set")] if given else words
    return shlex.join([*plain, *set_options([*given, override])])


@contextmanager
def unwrapped_interrupts(*others: type[BaseException]) -> Iterator[None]:
    """Raise KeyboardInterrupt for an error that has it, or one of `others`, as its cause.

    Libraries make classes for seconds while they are imported; Python 3.11 makes a RuntimeError of a Ctrl-C that comes
    while it calls `__set_name__`.
    """
    try:
        yield
    except Exception as error:
        from tasks.runs.errors import behind

        if behind(error, KeyboardInterrupt, *others) is None:
            raise
        raise KeyboardInterrupt from error


@contextmanager
def stopping_on_sigterm() -> Iterator[None]:
    """See `interrupting`; Prefect then marks the run Crashed, and everything is closed.

    Where SIGTERM comes while Prefect makes a task run, its own handling of the signal fails with a ValueError: an error
    that a signal was made into is KeyboardInterrupt here too.
    """
    from prefect.exceptions import TerminationSignal

    with interrupting(), unwrapped_interrupts(TerminationSignal):
        yield


@contextmanager
def interrupting() -> Iterator[None]:
    """End on SIGTERM, and on the SIGHUP of a terminal that is gone, as on Ctrl-C: all by `interrupt`."""
    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGALRM, interrupt)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # and not ignored, as under nohup
        signal.signal(signal.SIGHUP, interrupt)
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # and not ignored, as in the background of a shell
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, but in the middle of an import only when it has ended, as SIGALRM then, once.

    Python 3.11 may otherwise keep its import lock, for which all other threads would wait for ever; and what it makes
    classes of in an import by `exec` has it end the process by SIGINT, also where the interrupt was seen to.
    """
    waiting = in_import(frame)
    signal.setitimer(signal.ITIMER_REAL, AGAIN_S if waiting else 0)
    if not waiting:
        raise KeyboardInterrupt


def in_import(frame: FrameType | None) -> bool:
    """Whether what runs there is called by an import statement."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def quiet_prefect() -> None:
    """The console belongs to the run's table; Prefect's log lines go to its page."""
    from tasks.prefect.environment import prepare

    prepare()
