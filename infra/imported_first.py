"""Run a program, one of whose modules takes long to import, in less time: `imported_first.py MODULE PROGRAM [WORDS …]`.

Modules stay: Python looks for garbage among the objects that they make only where it is told to.
"""

from __future__ import annotations

import gc
import runpy
import sys
from importlib import import_module


def main() -> None:
    """Import the module, and be the program."""
    module, *sys.argv = sys.argv[1:]
    gc.disable()
    import_module(module)
    gc.enable()
    gc.freeze()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
