"""What the owner of a machine permits engines to do there, and passes on to them: never given by a spec."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

OWN_FOLDER = "."
NAMES = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV"),
        *(
            "XDG_CACHE_HOME",
            "HF_HUB_CACHE",
            "HF_MODULES_CACHE",
            "HF_HUB_OFFLINE",
            "HF_HUB_DISABLE_TELEMETRY",
        ),
        *("TRANSFORMERS_OFFLINE", "TRANSFORMERS_VERBOSITY", "DO_NOT_TRACK", "GLIBC_TUNABLES"),
        *("PPOFLOW_HOME", "PPOFLOW_GUARDED"),  # who lists or ends processes knows by them whose they are
    }
)
PREFIXES = (
    *("LC_", "PYTHON", "MALLOC_", "CUDA_", "CUBLAS_", "CUDNN_", "NVIDIA_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "DNNL_", "ONEDNN_", "ATEN_"),
)
SECRET_WORDS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "CREDENTIALS", "AUTH")


@dataclass(frozen=True)
class Permissions:
    """`plugins`: absolute folders (`.` is the spec's own) and packages from which user code may come.

    `trust_remote_code`: code that lies in a model's or a tokenizer's folder may run. `run_generated_code`: code that
    models write may run, for the reward unit_tests. `reward_urls`: servers that the rewards http and judge may send
    samples to, as http://HOST:PORT; empty: any.
    """

    plugins: tuple[str, ...] = (OWN_FOLDER,)
    trust_remote_code: bool = False
    run_generated_code: bool = False
    reward_urls: tuple[str, ...] = ()


def permissions_of(arguments: Sequence[str]) -> Permissions:
    """From `--plugins=PLACE` and `--reward-url=URL`, once for each, `--trust-remote-code`, `--run-generated-code`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--plugins", action="append")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--run-generated-code", action="store_true")
    parser.add_argument("--reward-url", action="append", default=[])
    given = parser.parse_args(list(arguments))
    plugins, servers = tuple(given.plugins or (OWN_FOLDER,)), tuple(given.reward_url)
    return Permissions(plugins, given.trust_remote_code, given.run_generated_code, servers)


def passed_on(name: str) -> str | None:
    """A variable of this engine's environment, which is built by name: PPOFLOW_REWARD_ENV names what rewards get."""
    return os.environ.get(name)


def ranks_environment(added: Mapping[str, str]) -> dict[str, str]:
    """For ranks of a model that this engine starts: what computing needs, by name, and `added` on top.

    They run no code of rewards, so what PPOFLOW_REWARD_ENV names, such as the keys of servers, stays here.
    """
    known = {name: value for name, value in os.environ.items() if name in NAMES or name.startswith(PREFIXES)}
    return {**{name: value for name, value in known.items() if not name.upper().endswith(SECRET_WORDS)}, **added}
