"""Several processes on one store, some of them killed: one of two writers wins, and nothing is ever half there."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from infra.artifacts import open_store
from tests.infra.artifacts.artifact_folders import CONTENT, fill
from tests.waiting import LONG_S

ROOT = Path(__file__).resolve().parents[3]
WRITER = """
import sys
from pathlib import Path
from infra.artifacts import open_store

root, name, start = sys.argv[1:]
store = open_store(root)
print("ready", flush=True)
sys.stdin.readline()
for number in range(40):
    folder = store.scratch()
    (folder / "who").write_text(f"{name} {number}" * 1000)
    print(store.put(folder, "scores", f"k{int(start) + number}").digest, flush=True)
"""


def start_writer(root: Path, name: str, first_key: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(root), name, str(first_key)]
    writer = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "ready\n"
    return writer


def test_two_processes_agree_on_every_key(tmp_path: Path):
    root = tmp_path / "store"
    store = open_store(root)
    fill(root / "scores/k7", CONTENT)
    writers = [start_writer(root, name) for name in ("first", "second")]
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("\n")
        writer.stdin.flush()
    outputs = [writer.communicate(timeout=LONG_S)[0].split() for writer in writers]
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) == 40
    for number, digest in enumerate(outputs[0]):
        ref = store.find("scores", f"k{number}")
        assert ref is not None
        assert ref.digest == digest
        store.fetch(ref)
    assert os.listdir(root / "scratch") == []
    assert os.listdir(root / "damaged") == ["scores-k7-1"]


def test_a_killed_writer_leaves_whole_artifacts_only(tmp_path: Path):
    root = tmp_path / "store"
    dice, written = random.Random(0), list[int]()
    store = open_store(root)
    for attempt in range(6):
        writer = start_writer(root, str(attempt), 1000 * attempt)
        assert writer.stdin is not None
        assert writer.stdout is not None
        writer.stdin.write("\n")
        writer.stdin.flush()
        first = [writer.stdout.readline().strip() for _ in range(dice.randint(1, 5))]
        time.sleep(dice.uniform(0, 0.01))
        writer.send_signal(signal.SIGKILL)
        announced = [*first, *writer.stdout.read().split()]  # communicate() would not see what readline() has buffered
        writer.wait()
        written.append(len(announced))
        keys = [f"k{1000 * attempt + number}" for number in range(40)]
        found = [ref for key in keys if (ref := store.find("scores", key)) is not None]
        assert [ref.digest for ref in found][: len(announced)] == announced
        assert len(found) <= len(announced) + 1
        for ref in found:
            store.fetch(ref)
    assert min(written) > 0
    assert min(written) < 40
