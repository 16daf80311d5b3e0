"""What transformers imports beside itself, in a process of its own: this one has most of it already."""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys

import pytest

from ppo_core.processes.lean_imports import without_collection

PROGRAM = """
import sys
{before}
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.loss import loss_utils
print(*sorted({{"sklearn", "scipy"}} & set(sys.modules)))
"""
LEAVE_OUT = "from ppo_core.processes.lean_imports import leave_out_unused\nleave_out_unused()"


@pytest.mark.parametrize(("before", "imported"), [(LEAVE_OUT, []), ("", ["scipy", "sklearn"])])
def test_transformers_imports_what_it_is_not_told_to_leave_out(before, imported):
    command = [sys.executable, "-c", PROGRAM.format(before=before)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.split() == imported


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_looked_for_after_the_imports_as_it_was_before(enabled):
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with without_collection():
            assert not gc.isenabled()
        assert gc.isenabled() == enabled
        with pytest.raises(ModuleNotFoundError), without_collection():
            importlib.import_module("no_such_module")
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()
