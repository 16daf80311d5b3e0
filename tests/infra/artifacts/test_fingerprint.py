from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from infra.artifacts.fingerprint import code_fingerprint, file_digest

SOURCES = {
    "__init__.py": '"""The package."""\n',
    "stage.py": "from pkg import direct\nfrom pkg.names import value\nfrom .sub import deep\nimport numpy\n"
    "from typing import TYPE_CHECKING\n"
    "if TYPE_CHECKING:\n    from pkg import only_types\nelse:\n    from pkg import otherwise\n\n\n"
    'def run(x):\n    """Doubles."""\n    from pkg import inside\n\n    return 2 * x\n',
    "direct.py": "import pkg.second\n",
    "second.py": "from pkg import stage\n",  # a cycle
    "names.py": "value = 1\n",
    "sub/__init__.py": "from . import sibling\n",
    "sub/deep.py": "from ..above import thing\n",
    "sub/sibling.py": "",
    "above.py": "thing = 1\n",
    "inside.py": "",
    "otherwise.py": "",
    "only_types.py": "",
    "unrelated.py": "",
}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    root = tmp_path / "pkg"
    for name, text in SOURCES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_it_changes_with_the_modules_that_run_and_with_no_other(package, name):
    before = code_fingerprint("pkg.stage", package)
    with (package / name).open("a") as source:
        source.write("\nadded = 1\n")
    changed = code_fingerprint("pkg.stage", package) != before
    assert changed == (name not in {"only_types.py", "unrelated.py"})


@pytest.mark.parametrize(
    ("old", "new", "changes"),
    [
        ("return 2 * x", "return 3 * x", True),
        ("return 2 * x", "return (2*x)  # twice", False),
        ('"""Doubles."""', '"""Gives the\n    double."""', False),
        ('    """Doubles."""\n', "", False),
        ("def run(x):", "\n\n# a stage\ndef run(\n    x,\n):", False),
        ("def run(x):", "def run(x, y=1):", True),
    ],
)
def test_comments_formatting_and_docstrings_do_not_count(package, old, new, changes):
    before = code_fingerprint("pkg.stage", package)
    text = (package / "stage.py").read_text()
    assert old in text
    (package / "stage.py").write_text(text.replace(old, new))
    assert (code_fingerprint("pkg.stage", package) != before) == changes


def test_a_moved_module_and_another_entry_give_other_fingerprints(package):
    assert code_fingerprint("pkg.names", package) != code_fingerprint("pkg.above", package)


def test_the_place_of_the_package_does_not_count(package, tmp_path):
    before = code_fingerprint("pkg.stage", package)
    moved = tmp_path / "elsewhere" / "pkg"
    moved.parent.mkdir()
    package.rename(moved)
    assert code_fingerprint("pkg.stage", moved) == before


@pytest.mark.parametrize("module", ["pkg.missing", "numpy", "pk.stage"])
def test_an_unknown_module_is_named(package, module):
    with pytest.raises(ValueError, match=f"module '{module}' is not in the package"):
        code_fingerprint(module, package)


def test_a_file_digest_is_the_sha256_of_its_bytes(tmp_path):
    (tmp_path / "file").write_bytes(b"abc" * 100_000)
    assert file_digest(tmp_path / "file") == hashlib.sha256(b"abc" * 100_000).hexdigest()
