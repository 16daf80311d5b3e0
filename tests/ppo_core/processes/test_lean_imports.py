"""What transformers imports beside itself, in a process of its own: this one has most of it already."""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys
from importlib import metadata

import pytest

from ppo_core.processes.lean_imports import (
    absent,
    distributions_by_package,
    only_for_gpus,
    quick_imports,
    seldom_collecting,
)

PROGRAM = """
import hashlib, sys
listed = []
sys.addaudithook(lambda event, found: event == "os.scandir" and listed.append(str(found[0])))
{before}
from transformers import AutoModelForCausalLM, AutoTokenizer, models
from transformers.loss import loss_utils
names = hashlib.sha256(" ".join(sorted(dir(models))).encode()).hexdigest()
print(sum(path.endswith("/models/zoedepth") for path in listed), names, end=" ")
print(*sorted({{"sklearn", "scipy", "triton"}} & set(sys.modules)))
"""
LEAVE_OUT = "from ppo_core.processes.lean_imports import leave_out_unused\nleave_out_unused()"


@pytest.mark.thorough
def test_transformers_imports_what_it_is_not_told_to_leave_out_and_lists_its_models_once_less():
    (once, models, *imported), (twice, all_models, *usual) = (
        output_of(PROGRAM.format(before=before)).split() for before in (LEAVE_OUT, "")
    )
    assert int(once) == int(twice) - 1
    assert models == all_models
    assert imported == ([] if only_for_gpus() else ["triton"])
    assert usual == ["scipy", "sklearn", "triton"]


@pytest.mark.parametrize(("version", "libraries"), [("2.13.0", []), ("2.13.0+cu130", []), ("2.13.0+cpu", ["triton"])])
def test_only_a_torch_for_processors_does_without_triton(version, libraries, monkeypatch):
    monkeypatch.setattr(metadata, "version", {"torch": version}.__getitem__)
    assert only_for_gpus() == libraries


def test_servers_are_asked_by_a_library_that_other_rewards_do_not_wait_for():
    program = "import sys, ppo_core.engines.scoring\nprint('aiohttp' in sys.modules)"
    assert output_of(program).strip() == "False"


def output_of(program: str) -> str:
    """In a process of its own."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=True)
    return done.stdout


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_looked_for_after_the_imports_as_it_was_before(enabled):
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with quick_imports():
            assert not gc.isenabled()
        assert gc.isenabled() == enabled
        with pytest.raises(ModuleNotFoundError), quick_imports():
            importlib.import_module("no_such_module")
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_only_what_is_there_after_the_first_imports_is_never_garbage():
    program = """
import gc
from ppo_core.processes.lean_imports import quick_imports
counts = [gc.get_freeze_count()]
for _ in range(2):
    with quick_imports():
        made = [[] for _ in range(100)]
    counts.append(gc.get_freeze_count())
print(counts[0] == 0, counts[1] > 100, counts[2] <= counts[1])
"""
    assert output_of(program).split() == ["True"] * 3


def test_distributions_by_package_are_those_of_python():
    assert distributions_by_package() == metadata.packages_distributions()
    assert distributions_by_package()["yaml"] == ["PyYAML"]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"a.dist-info/METADATA": "Name: A", "a.dist-info/top_level.txt": "one\ntwo\n"}, {"one": ["A"], "two": ["A"]}),
        (
            {
                "a.dist-info/METADATA": "X: y\nName: A-b\n\nName: c",
                "a.dist-info/RECORD": "one/x.py,,\ntwo.py,,\n3.so,,",
            },
            {"one": ["A-b"], "two": ["A-b"]},
        ),
        (
            {"a.egg-info/PKG-INFO": "Name: A", "a.egg-info/SOURCES.txt": "one/x.py\ntwo.py\nREADME.md"},
            {"one": ["A"], "two": ["A"]},
        ),
        ({"a.dist-info/METADATA": "Name: A"}, {}),
        ({"a.dist-info/METADATA": "Name: A", "empty.dist-info/INSTALLER": "pip"}, {}),
    ],
)
def test_so_are_those_of_each_kind(files, expected, tmp_path, monkeypatch):
    for name, text in {"one/x.py": "", "two.py": "", **files}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    importlib.invalidate_caches()  # the folder of a test that passed may have had the same name a moment ago
    assert distributions_by_package() == metadata.packages_distributions() == expected


def test_a_check_looks_for_garbage_seldom_and_leaves_it_as_it_was():
    before, usual = gc.get_threshold(), (700, 10, 10)
    try:
        gc.set_threshold(*usual)
        with seldom_collecting():
            assert gc.get_threshold()[0] > 10 * usual[0]
        assert gc.get_threshold() == usual
        with pytest.raises(ModuleNotFoundError), seldom_collecting():
            importlib.import_module("no_such_module")
        assert gc.get_threshold() == usual
    finally:
        gc.set_threshold(*before)


def test_what_is_absent_can_be_imported_afterwards(tmp_path, monkeypatch):
    """As its own and as a part of a package; what is imported already stays."""
    (tmp_path / "some_package").mkdir()
    for name in ("some_package/__init__.py", "some_package/part.py", "some_library.py"):
        (tmp_path / name).write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with absent("some_package.part", "some_library", "json"):
        assert importlib.import_module("some_package")
        assert importlib.import_module("json").dumps([]) == "[]"
        for name in ("some_package.part", "some_library"):
            with pytest.raises(ModuleNotFoundError, match=name):
                importlib.import_module(name)
    for name in ("some_package.part", "some_library"):
        assert importlib.import_module(name)
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "some_package")
