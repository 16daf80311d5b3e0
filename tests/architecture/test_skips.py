"""A test that is skipped proves nothing: each one that may be is named here, with what it lacks then."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.architecture.source_tree import Module, dotted, module_from, modules

MAY_SKIP = {
    "tests/e2e/browser.py": "Debian's Chromium, for tests/e2e/test_pages.py",
}
WAYS = ("skip", "skipif", "importorskip", "xfail")


def skips_in(module: Module) -> Iterator[int]:
    """The lines of a module that can leave a test out."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and node.attr in WAYS and dotted(node).startswith("pytest."):
            yield node.lineno


def test_only_what_is_on_the_list_is_ever_skipped() -> None:
    found = {module.path for module in modules("tests") if list(skips_in(module))}
    assert found == set(MAY_SKIP)


def test_every_way_to_skip_is_seen() -> None:
    ways = ["pytest.skip('x')", "@pytest.mark.skipif(True)\ndef f(): ...", "np = pytest.importorskip('numpy')"]
    assert [len(list(skips_in(module_from("tests/x.py", text)))) for text in ways] == [1, 1, 1]
