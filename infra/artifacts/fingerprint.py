"""Digests of code and of files, for cache keys.

A stage's result depends on the code that computes it: the module of the stage and all that it imports from its own
package. The closure is found by reading, not by importing, so it costs no torch. Comments, formatting and docstrings
do not count. Imports by a computed name (importlib) and files other than .py are not seen: name those in the spec.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TYPE_CHECKING = ("TYPE_CHECKING", "typing.TYPE_CHECKING")


@dataclass(frozen=True)
class _Module:
    """`digest` is of its code without docstrings, `imported` names all that could be modules."""

    digest: str
    imported: tuple[str, ...]


def code_fingerprint(module: str, package_root: Path) -> str:
    """sha256 over `module` and what it imports, directly or not, from the package in the folder `package_root`.

    `code_fingerprint("ppo_core.losses", Path("…/ppo_core"))`. Raises ValueError if the package has no such module.
    """
    if _source(module, package_root) is None:
        raise ValueError(
            f"module {module!r} is not in the package {package_root}: name one as {package_root.name}.<name>"
        )
    found: dict[str, _Module | None] = {}
    waiting = [module]
    while waiting:
        for name in _with_parents(waiting.pop()):  # importing a.b.c runs a and a.b first
            if name in found:
                continue
            source = _source(name, package_root)
            if source is None:
                found[name] = None
                continue
            read = found[name] = _read(source.read_bytes(), name, is_package=source.name == "__init__.py")
            waiting += read.imported
    digests = [f"{name} {read.digest}\n" for name, read in sorted(found.items()) if read is not None]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """sha256 of the file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_digests(folder: Path) -> dict[str, str]:
    """The digest of each file below a folder, by its relative name. Hidden ones (.git, .cache, .env) do not count."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    names = [path.relative_to(folder) for path in files]
    seen = [name for name in names if not any(part.startswith(".") for part in name.parts)]
    return {name.as_posix(): file_digest(folder / name) for name in seen}


def _source(module: str, package_root: Path) -> Path | None:
    first, *rest = module.split(".")
    if first != package_root.name:
        return None
    folder = package_root.joinpath(*rest)
    candidates = [folder / "__init__.py", folder.with_name(folder.name + ".py")] if rest else [folder / "__init__.py"]
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def _with_parents(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


@functools.cache  # the programs of a run's engines share most of their modules
def _read(source: bytes, module: str, *, is_package: bool) -> _Module:
    tree = ast.parse(source, filename=module)
    imported = tuple(_imported(tree, module, is_package=is_package))
    dump = ast.dump(_without_docstrings(tree))
    return _Module(hashlib.sha256(dump.encode()).hexdigest(), imported)


def _imported(tree: ast.Module, module: str, *, is_package: bool) -> Iterator[str]:
    """Every name that could be a module; of `from a import b` both a and a.b, since b may be a module or a name."""
    for node in _statements(tree, running=True):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                above = module.split(".")[: None if is_package and node.level == 1 else -(node.level - is_package)]
                origin = ".".join([*above, *filter(None, [node.module])])
            yield origin
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def _statements(node: ast.AST, *, running: bool = False) -> Iterator[ast.AST]:
    """The statements below a node, and what holds them; `running`: all but the bodies of `if TYPE_CHECKING:`."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            continue  # expressions, which are most of a tree, hold no statements
        if running and isinstance(child, ast.If) and ast.unparse(child.test) in TYPE_CHECKING:
            for otherwise in child.orelse:
                yield otherwise
                yield from _statements(otherwise, running=True)
        else:
            yield child
            yield from _statements(child, running=running)


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in (tree, *_statements(tree)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            match node.body:
                case [ast.Expr(value=ast.Constant(value=str())), *rest]:
                    node.body = rest
    return tree
