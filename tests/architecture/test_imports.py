"""Who may import what: the layers meet only where the design says so, the heavy libraries stay where they belong."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence

import pytest

from tests.architecture.source_tree import (
    LAYERS,
    ROOT,
    Import,
    Module,
    dotted,
    edges,
    imports_of,
    module_from,
    modules,
    reachable,
    within,
)

ALLOWED_OF_OURS = {
    "flows": ("flows", "tasks", "ppo_core.spec", "infra.artifacts"),
    "tasks": ("tasks", "ppo_core.spec", "ppo_core.records", "infra"),
    "ppo_core": ("ppo_core",),
    "infra": ("infra",),
}
LIBRARY_HOMES = {
    "prefect": ("flows", "tasks"),
    "torch": ("ppo_core",),
    "transformers": ("ppo_core",),
    "deepspeed": ("ppo_core",),
    "vllm": ("ppo_core",),
    "mlflow": ("infra",),
    "huggingface_hub": ("infra",),
    "boto3": ("infra",),
    "botocore": ("infra",),
    "ray": ("infra",),
}
HEAVY = ("torch", "transformers", "deepspeed", "vllm")
TORCH_FREE = ("ppo_core.spec", "ppo_core.records")
NOT_LAYERS = ("tests", "benchmarks", "examples")
Rule = Callable[[Module], Iterator[str]]
SETTINGS = "infra.settings"
ENVIRONMENT_HOMES = (SETTINGS, "ppo_core.processes.permissions")  # of the flow, and of engines
ENVIRONMENT = (
    "os.environ",
    "os.environb",
    "os.getenv",
    "os.getenvb",
    "os.putenv",
    "os.unsetenv",
    "pydantic_settings",
    "dotenv",
)


def layer_offences(module: Module) -> Iterator[str]:
    allowed = ALLOWED_OF_OURS[module.layer]
    for used in imports_of(module):
        ours = within(used.name, (*LAYERS, *NOT_LAYERS))
        # `from ppo_core import spec` and `import ppo_core.spec` both name ppo_core.spec.
        if ours and not within(used.name, allowed):
            yield f"{module.path}:{used.line}: {module.layer} imports {used.name}, not one of {', '.join(allowed)}"


def library_offences(module: Module) -> Iterator[str]:
    for used in imports_of(module):
        homes = LIBRARY_HOMES.get(used.name.partition(".")[0])
        if homes and (module.layer not in homes or (within(module.name, TORCH_FREE) and within(used.name, HEAVY))):
            yield f"{module.path}:{used.line}: {module.name} imports {used.name}; its home is {' and '.join(homes)}"


def environment_offences(module: Module) -> Iterator[str]:
    if module.name in ENVIRONMENT_HOMES:
        return
    named = [Import(dotted(node), node.lineno) for node in ast.walk(module.tree) if isinstance(node, ast.Attribute)]
    for used in [*imports_of(module), *named]:
        if used.name in ENVIRONMENT or within(used.name, ("pydantic_settings", "dotenv")):
            yield f"{module.path}:{used.line}: {used.name} outside {SETTINGS}"


def state_offences(module: Module) -> Iterator[str]:
    """Module-level mutable state and work at import time, as far as the syntax shows them."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Global):
            yield f"{module.path}:{node.lineno}: `global {', '.join(node.names)}`: state belongs to an object"
    for node in module.tree.body:
        if isinstance(node, ast.For | ast.While | ast.With) or (
            isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant)
        ):
            yield f"{module.path}:{node.lineno}: work at import time"
        if isinstance(node, ast.Assign | ast.AnnAssign) and _is_mutable(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            # A table in capitals is read only by convention; anything else that can change is state.
            for name in (dotted(target) for target in targets):
                if not (name.isupper() or name == "__all__"):
                    yield f"{module.path}:{node.lineno}: module-level mutable state `{name}`"


def _is_mutable(value: ast.expr | None) -> bool:
    makers = ("list", "dict", "set", "bytearray", "defaultdict", "deque", "Counter", "OrderedDict")
    if isinstance(value, ast.Call):
        return dotted(value.func).rpartition(".")[2] in makers
    return isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)


def cycles(sources: Sequence[Module]) -> list[str]:
    graph = edges((module for module in sources if not module.is_package), for_types=True)
    return sorted(
        name for name, targets in graph.items() if any(name in reachable(target, graph) for target in targets)
    )


@pytest.mark.parametrize("rule", [layer_offences, library_offences, environment_offences, state_offences])
def test_the_layers_keep_the_rule(rule: Rule) -> None:
    offences = [offence for module in modules(*LAYERS) for offence in rule(module)]
    assert not offences, "\n".join(offences)


def test_no_module_imports_itself_by_a_detour() -> None:
    assert cycles(modules(*LAYERS)) == []


@pytest.mark.parametrize("start", TORCH_FREE)
def test_torch_free_modules_reach_no_heavy_library(start: str) -> None:
    sources = {module.name: module for module in modules(*LAYERS)}
    reached = [sources[name] for name in sorted(reachable(start, edges(sources.values())))]
    heavy = [(module.path, used.name) for module in reached for used in imports_of(module) if within(used.name, HEAVY)]
    assert heavy == []


@pytest.mark.parametrize(
    ("start", "unwanted"),
    [
        *((start, HEAVY) for start in (*TORCH_FREE, "flows.cli")),
        ("tasks.checks.run", (*HEAVY, "prefect", "mlflow")),  # `train` imports these while it checks
    ],
)
def test_importing_brings_nothing_slow_into_the_process(start: str, unwanted: tuple[str, ...]) -> None:
    """Libraries can import torch too, which no reading of our own sources shows."""
    program = f"import sys, {start}; print(sorted({set(unwanted)} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (layer_offences, "ppo_core/losses.py", "from infra import runs"),
        (layer_offences, "infra/runs/records.py", "def f():\n    import ppo_core.spec"),
        (layer_offences, "flows/ppo.py", "from ppo_core import losses"),
        (layer_offences, "flows/ppo.py", "from infra import artifacts, registry"),
        (layer_offences, "tasks/rollouts.py", "from ppo_core.losses import policy_loss"),
        (layer_offences, "infra/runs/records.py", "import importlib\nimportlib.import_module('ppo_core.spec')"),
        (layer_offences, "ppo_core/engines/rollout.py", "from ... import infra"),
        (layer_offences, "tasks/rollouts.py", "from tests.fakes import store"),
        (library_offences, "infra/runs/records.py", "import torch.nn"),
        (library_offences, "ppo_core/spec/run_spec.py", "def f():\n    from torch import nn"),
        (library_offences, "flows/ppo.py", "import mlflow"),
        (library_offences, "ppo_core/losses.py", "from prefect import task"),
        (environment_offences, "ppo_core/losses.py", "import os\nx = os.environ['A']"),
        (environment_offences, "infra/runs/records.py", "from os import getenv"),
        (environment_offences, "infra/runs/records.py", "from pydantic_settings import BaseSettings"),
        (state_offences, "infra/runs/records.py", "cache = {}"),
        (state_offences, "infra/runs/records.py", "cache: dict[str, int] = dict()"),
        (state_offences, "infra/runs/records.py", "def f():\n    global x\n    x = 1"),
        (state_offences, "infra/runs/records.py", "print('hello')"),
    ],
)
def test_an_offence_is_seen(rule: Rule, path: str, text: str) -> None:
    assert len(list(rule(module_from(path, text)))) == 1


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (
            layer_offences,
            "flows/ppo.py",
            "from ppo_core.spec import RunSpec\nfrom infra.artifacts import ArtifactRef\nimport tasks.sft",
        ),
        (layer_offences, "tasks/sft.py", "from ppo_core import records, spec\nfrom infra import runs"),
        (library_offences, "ppo_core/losses.py", "import torch"),
        (environment_offences, "infra/settings.py", "import os\nx = os.environ['A']"),
        (environment_offences, "infra/runs/records.py", "import os\nx = os.path.join('a', 'b')"),
        (state_offences, "infra/runs/records.py", "'''Doc.'''\nNAMES = {'a': 1}\nlimit = 3\n__all__ = ['f']"),
    ],
)
def test_what_is_allowed_passes(rule: Rule, path: str, text: str) -> None:
    assert list(rule(module_from(path, text))) == []


def test_a_cycle_is_seen_also_inside_functions() -> None:
    first = module_from("infra/a.py", "from infra import b")
    second = module_from("infra/b.py", "def f():\n    from infra.a import x")
    third = module_from("infra/c.py", "import infra.a")
    assert cycles([first, second, third]) == ["infra.a", "infra.b"]


def test_a_cycle_is_seen_also_where_only_types_are_imported() -> None:
    first = module_from("infra/a.py", "from infra import b")
    second = module_from("infra/b.py", "if TYPE_CHECKING:\n    from infra.a import x")
    assert cycles([first, second]) == ["infra.a", "infra.b"]
