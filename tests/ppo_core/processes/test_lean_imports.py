"""What transformers imports beside itself, in a process of its own: this one has most of it already."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
