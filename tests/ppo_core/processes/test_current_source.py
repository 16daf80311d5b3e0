"""User code runs as it is, whatever was compiled of it before."""

from __future__ import annotations

import os
import py_compile
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ppo_core.processes.current_source import hook_of, import_from
from ppo_core.processes.plugins import Sources, load_function

FILES = {
    "compiled_before.py": "from helps import words\nfrom held.inner import also\ndef f(): return 'a', words, also\n",
    "helps.py": "words = 'a'\n",
    "held/__init__.py": "",
    "held/inner.py": "also = 'a'\n",
}


@pytest.fixture
def edited(tmp_path: Path) -> Iterator[Path]:
    """A folder of code that was compiled, and edited to the same size within the second."""
    before, modules = (list(sys.path), list(sys.path_hooks)), set(sys.modules)
    for name, text in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        for now in (text, text.replace("'a'", "'b'")):
            file.write_text(now)
            os.utime(file, (10**9, 10**9))
            if now == text:
                py_compile.compile(str(file), doraise=True)
    yield tmp_path
    sys.path[:], sys.path_hooks[:] = before
    for name in set(sys.modules) - modules:
        del sys.modules[name]


@pytest.mark.parametrize("name", ["compiled_before.py:f", "compiled_before:f"])
def test_what_was_compiled_before_an_edit_does_not_run(edited: Path, name: str) -> None:
    """Neither of the file, nor of a module or a package beside it; Python itself would take all three."""
    compiled = {file: file.read_bytes() for file in edited.rglob("*.pyc")}
    assert load_function(name, Sources(edited))() == ("b", "b", "b")
    assert {file: file.read_bytes() for file in edited.rglob("*.pyc")} == compiled


def test_a_folder_is_entered_once_and_an_environment_in_it_is_left_alone(edited: Path) -> None:
    for _ in range(2):
        import_from(edited)
    assert (sys.path.count(str(edited)), sys.path_hooks.count(hook_of(edited))) == (1, 1)
    assert all(hasattr(hook, "__name__") for hook in sys.path_hooks)
    packages = edited / ".venv" / "packages"
    sys.path.append(str(packages))
    for entry in (packages, packages / "one", edited.parent):
        with pytest.raises(ImportError, match="is not in"):
            hook_of(edited)(str(entry))
    assert hook_of(edited)(str(edited / "held")).path == str(edited / "held")
