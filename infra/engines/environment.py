"""Which variables an engine sees: it is built from what an engine needs, by name, and holds no key of any server.

Engines run code of users (reward functions) and of models; artifacts and records reach them as local files, so none of
them needs to know how to log in anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

NAMES = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TZDIR", "TMPDIR", "TMP", "TEMP"),
        *("LD_LIBRARY_PATH", "LD_PRELOAD", "GLIBC_TUNABLES", "VIRTUAL_ENV", "XDG_CACHE_HOME"),
        # Triton, Inductor and DeepSpeed compile kernels.
        *("CC", "CXX", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "MAX_JOBS"),
        "PPOFLOW_HOME",  # tells whoever lists processes whose engines these are
    }
)
PREFIXES = (
    *("LC_", "PYTHON", "MALLOC_", "CUDA_", "CUBLAS_", "CUDNN_", "NVIDIA_", "NCCL_", "GLOO_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_", "DNNL_", "ONEDNN_", "ATEN_"),
    *("TORCH", "PYTORCH_", "TRITON_", "DS_", "VLLM_", "HF_", "TRANSFORMERS_", "TOKENIZERS_"),
)
NETWORK = frozenset(
    {
        *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    }
)
"""How to get out of this machine: for reward functions that ask a judge."""
SECRET_WORDS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL", "AUTH")
"""How a word of a secret's name ends."""
WHOLE_WORDS = frozenset({"PASS", "PWD", "PW", "PAT", "DSN", "CONNECTION"})
"""Words that others end with too, such as COMPAT."""
LOGIN_IN_ADDRESS = re.compile(r"://[^/\s]*@")


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


def is_secret(name: str, value: str) -> bool:
    """Whether a variable looks like one: by a word of its name (HF_TOKEN, VLLM_API_KEY), or an address with a login."""
    words = name.upper().split("_")
    named = any(word in WHOLE_WORDS or word.removesuffix("S").endswith(SECRET_WORDS) for word in words)
    return named or bool(LOGIN_IN_ADDRESS.search(value))
