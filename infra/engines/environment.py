"""Which variables an engine sees: it is built from what an engine needs, by name, and holds no key of any server.

Engines run code of users (reward functions) and of models; artifacts and records reach them as local files, so none of
them needs to know how to log in anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

NAMES = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TZDIR", "TMPDIR", "TMP", "TEMP"),
        *("LD_LIBRARY_PATH", "LD_PRELOAD", "GLIBC_TUNABLES", "VIRTUAL_ENV", "XDG_CACHE_HOME"),
        # Triton, Inductor and DeepSpeed compile kernels.
        *("CC", "CXX", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "MAX_JOBS"),
        *("DS_ACCELERATOR", "DS_SKIP_CUDA_CHECK", "DS_IGNORE_CUDA_DETECTION", "DS_NVCC_THREADS", "DS_DEBUG_CUDA_BUILD"),
        # Models are folders by the time that an engine reads them. HF_HOME, which holds the hub's token, is not needed.
        *("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_MODULES_CACHE"),
        *("HF_ENDPOINT", "HF_HUB_DISABLE_TELEMETRY", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_HUB_VERBOSITY"),
        "PPOFLOW_HOME",  # tells whoever lists processes whose engines these are
    }
)
PREFIXES = (
    *("LC_", "PYTHON", "MALLOC_", "CUDA_", "CUBLAS_", "CUDNN_", "NVIDIA_", "NCCL_", "GLOO_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_", "DNNL_", "ONEDNN_", "ATEN_"),
    *("TORCH", "PYTORCH_", "TRITON_", "DS_BUILD_", "VLLM_", "TRANSFORMERS_", "TOKENIZERS_"),
)
NETWORK = frozenset(
    {
        *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    }
)
"""How to get out of this machine: for reward functions that ask a judge."""
DEFAULTS = {"OPENBLAS_THREAD_TIMEOUT": "4"}
"""What an engine sees unless the user has set it. numpy's threads, which would spin for a tenth of a second when a
process starts and after each product, sleep after 2^4 cycles: the least that OpenBLAS takes."""
SECRET_WORDS = (
    *("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL", "AUTH", "AUTHORIZATION"),
    *("BEARER", "COOKIE", "HEADER", "JWT", "LOGIN", "SIGNATURE"),
)
"""How a word of a secret's name ends, but for an S and digits."""
WHOLE_WORDS = frozenset({"PASS", "PWD", "PW", "PAT", "DSN", "CONNECTION"})
"""Words that others end with too, such as COMPAT."""
LOGIN_IN_ADDRESS = re.compile(r"://([^/\s]*|[^/:\s]*:(?![0-9]+/)\S*)@")
"""A password may hold a slash."""
KEY_IN_ADDRESS = re.compile(
    r"(?i)://\S*[?&]([^=&\s]*[-_])?(passw[a-z]*|secret|token|(api)?key|sig|signature|auth|authorization)[-_0-9]*="
)


def permitted(environment: Mapping[str, str]) -> dict[str, str]:
    """What every engine sees of an environment."""
    return {
        name: value
        for name, value in environment.items()
        if (name in NAMES or name.startswith(PREFIXES)) and not is_secret(name, value)
    }


def way_out(environment: Mapping[str, str]) -> dict[str, str]:
    """What the scoring engine sees besides: proxies and certificates, but no proxy's login."""
    # A proxy's address needs no scheme, so any @ may be that of a login.
    return {name: value for name, value in environment.items() if name in NETWORK and "@" not in value}


def around_proxies(environment: Mapping[str, str], hosts: Sequence[str]) -> dict[str, str]:
    """NO_PROXY in both spellings, with these hosts besides those that it has; nothing where no proxy is set.

    >>> around_proxies({"http_proxy": "http://proxy:3128", "NO_PROXY": "a.corp"}, ["127.0.0.1"])
    {'NO_PROXY': 'a.corp,127.0.0.1', 'no_proxy': 'a.corp,127.0.0.1'}
    """
    set_ones = {name.lower() for name, value in environment.items() if value}
    if set_ones.isdisjoint(("http_proxy", "https_proxy", "all_proxy")):
        return {}
    found = {}
    # Of a client that reads both, each spelling hides the other: where only one is set, both get what it names.
    for name, other in (("NO_PROXY", "no_proxy"), ("no_proxy", "NO_PROXY")):
        listed = (environment.get(name) or environment.get(other) or "").split(",")
        listed = [host.strip() for host in listed if host.strip()]
        found[name] = ",".join(listed if listed == ["*"] else dict.fromkeys([*listed, *hosts]))
    return found


def is_secret(name: str, value: str) -> bool:
    """Whether a variable looks like one: by a word of its name (VLLM_API_KEY2), or an address with a login or a key."""
    words = [word.rstrip("0123456789") for word in name.upper().split("_")]
    named = any(word in WHOLE_WORDS or word.removesuffix("S").endswith(SECRET_WORDS) for word in words)
    return named or bool(LOGIN_IN_ADDRESS.search(value) or KEY_IN_ADDRESS.search(value))
