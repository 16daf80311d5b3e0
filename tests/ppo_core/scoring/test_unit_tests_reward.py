"""The reward `unit_tests`: what passes, what a response cannot do while it is tried, what is refused before."""

from __future__ import annotations

import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from ppo_core.processes.plugins import Sources
from ppo_core.records import InputError, PromptRow
from ppo_core.scoring.reward import Sample
from ppo_core.scoring.weighted import WeightedRewards
from ppo_core.spec import RewardSpec
from tests.processes import adopting, command_line

ALLOWED = Sources(Path(), run_generated_code=True)
TESTS = ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'", "assert add(0, 0) == 0", "assert add(1, 1) == 2"]
ADD = "def add(a, b):\n    return a + b\n"
EVERYTHING = ["assert True"]


def rewards(sources: Sources = ALLOWED, said: list[Any] | None = None, **keys: Any) -> WeightedRewards:
    spec = RewardSpec.model_validate({"sources": [{"kind": "unit_tests", **keys}]})
    notes = said if said is not None else []
    return WeightedRewards(spec, sources, "answer", lambda *report: notes.append(report))


def row(tests: Any, name: str = "tests") -> PromptRow:
    return PromptRow("a", "Write it.", [1], None, {name: tests})


def score(response: str, tests: Any = TESTS, **keys: Any) -> float | None:
    (parts,) = rewards(**keys).score([Sample(row(tests), response)])
    return parts.scores["unit_tests"]


@pytest.mark.parametrize(
    ("response", "passed"),
    [
        (ADD, 1.0),
        (f"Like this:\n```python\nwrong(\n```\nno, so:\n```python\n{ADD}```\nDone.", 1.0),
        (f"```python\n{ADD}```\nRun it:\n```bash\npython add.py\n```\nIt prints\n```\n3\n```\n", 1.0),
        (f"~~~\n{ADD}~~~\nRun it:\n```sh\npython add.py\n```\n", 1.0),
        ("1. So:\n   ```Python\n   def add(a, b):\n       return a + b\n   '''\nleft'''\n   ```\n", 1.0),
        ("def add(a, b):\n    return 3 if a else 0", 0.5),
        ("def add(a, b):\n    return int(a) + int(b)", 0.75),
        *(("def add(a, b:", 0.0), ("", 0.0)),
        (f"{ADD}1 / 0", 0.0),
        (f"{ADD}raise SystemExit(0)", 0.0),
        (f"import os\n{ADD}os._exit(0)", 0.0),
        ("import os\ndef add(a, b):\n    if a == 0: os._exit(0)\n    return a + b\n", 0.5),
        (f"{ADD}if __name__ == '__main__': 1 / 0", 1.0),
        (f"import collections, math, re, json\nclass A: pass\n{ADD}\ud800", 0.0),
    ],
)  # fmt: skip
def test_the_score_is_the_part_of_the_tests_that_pass(response: str, passed: float) -> None:
    assert score(response) == passed


def test_tests_know_the_code_and_not_one_another() -> None:
    assert score("seen = []", ["seen.append(1); x = 1", "assert seen == [1]", "x", "assert __name__ == 'a'"]) == 0.5
    assert score(ADD, "assert add(1, 2) == 3\nassert add(1, 2) == 4") == 0.0


@pytest.mark.parametrize(
    ("response", "tests"),
    [
        (
            "n = 0\ndef count():\n    global n\n    n += 1\n    return n",
            ["count(); assert n == 1", "assert count() == 1"],
        ),
        ("def twice(x):\n    return 2 * factor(x)", ["def factor(x): return x\nassert twice(2) == 4"]),
        ("class A:\n    pass", ["import pickle\nassert isinstance(pickle.loads(pickle.dumps(A())), A)"]),
        ("def f() -> int:\n    return 1", ["from solution import f as g\nassert g.__annotations__ == {'return': int}"]),
        ("from __future__ import annotations", ["def f() -> int: pass\nassert f.__annotations__ == {'return': int}"]),
    ],
    ids=["a global", "a helper of the test", "pickle", "an import of the code", "a future of the code"],
)
def test_code_and_test_have_the_same_names(response: str, tests: list[str]) -> None:
    assert score(response, tests) == 1.0


def test_a_pattern_cuts_the_code_out() -> None:
    assert score(f"<code>{ADD}</code>", pattern="(?s)<code>(.*)</code>") == 1.0
    assert score(ADD, pattern="(?s)<code>(.*)</code>") == 0.0


def test_the_answer_column_can_have_the_tests() -> None:
    found, row = rewards(column="answer"), PromptRow("a", "Write it.", [1], TESTS, {})
    found.check_rows([row])
    assert found.score([Sample(row, ADD)])[0].scores == {"unit_tests": 1.0}


HANGS = [
    "while True: pass",
    "import time\ntime.sleep(1000)",
    "import signal\nsignal.pause()",
    "import signal, time\nsignal.signal(signal.SIGXCPU, lambda *_: None)\nwhile True: pass",
]


@pytest.mark.thorough
def test_code_that_hangs_is_ended_and_fails_what_is_left() -> None:
    started, tests = time.monotonic(), row(["assert x", "later()", "assert x", "assert x"])
    codes = [f"def later():\n{textwrap.indent(hang, ' ')}\nx = 1" for hang in HANGS]
    scored = rewards(timeout_s=6).score([Sample(tests, code) for code in codes])
    assert [one.scores["unit_tests"] for one in scored] == [0.25] * len(HANGS)
    assert time.monotonic() - started < 60


@pytest.mark.parametrize(
    "attempt",
    [
        "import os\nos.fork()",
        "import os\nos.posix_spawn('/bin/true', ['true'], {})",
        "import subprocess\nsubprocess.run(['true'])",
        "import threading\nthreading.Thread(target=print).start()",
        "import socket\nsocket.socket()",
        "import os\nos.kill(os.getppid(), 0)",
        "import os\nos.kill(-1, 0)",
        "import os\nos.killpg(os.getpgid(os.getppid()), 0)",
        "x = bytearray(10**9)",
        "open('large', 'wb').write(b'0' * 2**21)",
        "import ctypes\nassert ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0",
        "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0",
        "import os\nos.setpriority(0, os.getppid(), os.getpriority(0, os.getppid()))",
        "import os\nos.sched_setaffinity(os.getppid(), os.sched_getaffinity(0))",
        "import ctypes\nassert ctypes.CDLL(None).shmget(0, 4096, 0o1600) != -1",
        "import ctypes\nassert ctypes.CDLL(None).msgget(0, 0o1600) != -1",
        "import ctypes\nassert ctypes.CDLL(None).semget(0, 1, 0o1600) != -1",
        "import ctypes\nassert ctypes.CDLL(None, use_errno=True).umount2(b'.', 0) and ctypes.get_errno() == 22",
        "import ctypes, os\nhere = os.uname().nodename.encode()\n"
        "assert ctypes.CDLL(None).sethostname(here, len(here)) == 0",
        "import re\nassert int(re.search('CapPrm:(.*)', open('/proc/self/status').read())[1], 16) & ~4",
        "import os\nassert os.pidfd_open(os.getppid())",
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))",
        "import numpy",
        "import ppo_core",
        "import os\nassert set(os.environ) - {'PYTHONHASHSEED', 'LC_CTYPE'}",
        "import os\nassert os.listdir('.') != ['solution.py']",
        "import sys\nassert sys.stdin.read()",
    ],
)
def test_what_reaches_beyond_the_process_fails(attempt: str) -> None:
    assert score(f"{attempt}\nreached = True", ["assert reached", "assert True"]) == 0.0
    assert score("reached = True", ["assert reached", "assert True"]) == 1.0


@pytest.mark.parametrize(
    "attempt",
    [
        "open(f'/proc/{os.getppid()}/mem', 'r+b')",
        "open(f'/proc/{os.getppid()}/environ').read()",
        "os.readlink(f'/proc/{os.getppid()}/fd/0')",
        "open(f'/proc/{os.getppid()}/oom_score_adj', 'a')",
        "open('PLACE/file', 'a')",
        "open('PLACE/new', 'w')",
        "os.truncate('PLACE/file', 0)",
        "os.remove('PLACE/file')",
        "os.rename('PLACE/file', 'file')",
        "os.rmdir('PLACE/folder')",
        "os.mkdir('PLACE/another')",
        "os.link('PLACE/file', 'file')",
        "os.symlink('PLACE/file', 'file')\nopen('file', 'a')",
        "os.mknod('device', 0o20600, os.makedev(1, 3))",
        "os.mknod('device', 0o60600, os.makedev(7, 0))",
    ],
)
def test_what_reaches_other_files_and_processes_fails_where_the_kernel_has_landlock(
    attempt: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("ours")
    (tmp_path / "folder").mkdir()
    assert score(f"import os\n{attempt}\nreached = True".replace("PLACE", str(tmp_path)), ["assert reached"]) == 0.0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
    assert (tmp_path / "file").read_text() == "ours"


def test_code_does_what_it_likes_in_its_own_folder() -> None:
    likes = """
import os, pathlib, shutil, tempfile
os.makedirs("a/b")
pathlib.Path("a/b/c").write_text("text")
os.rename("a/b/c", "a/d")
shutil.copy2("a/d", "a/e")
os.link("a/d", "f")
os.truncate("f", 2)
with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
    print(pathlib.Path(folder, "g").write_text("g"), file=nowhere)
read = pathlib.Path("a/d").read_text(), pathlib.Path(os.__file__).read_text()
shutil.rmtree("a")
"""
    assert (
        score(likes, ["assert read[0] == 'te' and read[1] and sorted(os.listdir()) == ['f', 'solution.py', 'test.py']"])
        == 1.0
    )


def test_code_that_changes_its_folder_is_tested_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "test.py").write_text("ours")
    assert score(f"import os\nos.chdir({str(tmp_path)!r})\n{ADD}") == 1.0
    assert (tmp_path / "test.py").read_text() == "ours"


def test_a_fork_bomb_leaves_no_process() -> None:
    bomb = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n"
    with adopting():
        assert score(bomb, EVERYTHING, timeout_s=6) == 0.0
        ours = [command_line(child) for child in psutil.Process().children(recursive=True)]
        assert [words for words in ours if "run_unit_tests" in " ".join(words)] == []


FLOODS = """
import os, sys
for _ in range(9999):
    os.write(1, b"x" * 65536)
    print("x" * 65536, file=sys.stderr)
"""
GUESSES = """
import os
for number in range(3, 32):
    try:
        os.write(number, b"ready\\n0\\n")
    except OSError:
        pass
1 / 0
"""


def test_output_goes_nowhere_however_much_there_is() -> None:
    assert score(FLOODS, EVERYTHING, timeout_s=60) == 1.0
    assert score(GUESSES, EVERYTHING) == 0.0


def test_sets_have_the_same_order_each_time() -> None:
    response = "order = ''.join(sorted({str(n) for n in range(99)}, key=hash))"
    assert [score(response, ["assert order[:12] == '441222381572'"]) for _ in range(4)] == [1.0] * 4


def test_many_responses_keep_their_order_and_tell_of_their_progress() -> None:
    said: list[Any] = []
    samples = [Sample(row([f"assert n == {number % 3}"]), "n = 1") for number in range(9)]
    parts = rewards(said=said).score(samples)
    assert [part.scores["unit_tests"] for part in parts] == [0.0, 1.0, 0.0] * 3
    assert said == [(number, 9, "responses tested by unit_tests") for number in range(1, 10)]
    assert threading.active_count() < 50


def test_a_deadline_before_anything_runs_is_no_score() -> None:
    (parts,) = rewards(timeout_s=0.001).score([Sample(row(TESTS), ADD)])
    assert parts.error() == "not scored by unit_tests: its process was not ready after timeout_s=0.001"


def test_without_the_owners_permission_it_is_refused() -> None:
    with pytest.raises(InputError, match=r"unit_tests runs code that models write.*set PPOFLOW_RUN_GENERATED_CODE=1"):
        rewards(replace(ALLOWED, run_generated_code=False))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, r"runs the tests in the column 'tests', which is None in row 2 \('Write it.'\): give Python statements"),
        ([], r"which is \[\] in row 2"),
        ([" "], r"which is \[' '\] in row 2"),
        ({"a": 1}, r"which is \{'a': 1\} in row 2"),
        (["assert (", "assert 1"], r"cannot read a test of row 2 \('assert \('\) as Python: .*: correct the column"),
        ("\0", "cannot read a test of row 2"),
    ],
)
def test_rows_without_tests_are_refused(given: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        rewards().check_rows([row(TESTS), row(given)])
    rewards(column="mine").check_rows([row("assert add(1, 2) == 3", "mine")])


@pytest.mark.parametrize(
    "test",
    [
        "def test_add():\n    assert add(1, 2) == 4",
        "METADATA = {}\n\ndef check(candidate):\n    assert candidate(1, 2) == 4",
        "'''Add.'''\nimport unittest as u\nclass T(u.TestCase):\n    def test(self): self.assertEqual(add(1, 2), 4)\n"
        "if __name__ == '__main__':\n    u.main()",
        "async def test_add(): pass",
        "import math",
        "# nothing", '["assert add(1, 2) == 3", "assert add(0, 0) == 0"]',
        '{"inputs": ["1 2"], "outputs": ["3"], "seconds": -1}',
    ],
)  # fmt: skip
def test_a_test_that_calls_nothing_is_refused(test: str) -> None:
    refusal = r"unit_tests would pass any code in a test of row 2 \(.*\), which calls nothing: .* column 'tests'$"
    with pytest.raises(InputError, match=refusal):
        rewards().check_rows([row(TESTS), row([*TESTS, test])])
    rewards().check_rows([row(TESTS), row([*TESTS, f"{test}\nadd(1, 2)"])])
    rewards().check_rows([row(["x = add(1, 2)", "from solution import add", "import solution"])])
