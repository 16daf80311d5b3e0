"""What of an environment an engine sees."""

from __future__ import annotations

import pytest

from infra.engines.environment import around_proxies, is_secret, permitted, way_out


@pytest.mark.parametrize(
    "name",
    [
        *(
            "PATH",
            "LC_ALL",
            "PYTHONPATH",
            "CUDA_VISIBLE_DEVICES",
            "NCCL_DEBUG",
            "OMP_PLACES",
            "KMP_BLOCKTIME",
            "CUDA_DEVICE_MAX_CONNECTIONS",
            "NVIDIA_DISABLE_FORWARD_COMPAT",
            "MKL_CBWR",
        ),
        *(
            "TORCH_HOME",
            "VLLM_CPU_KVCACHE_SPACE",
            "HF_HUB_OFFLINE",
            "HF_MODULES_CACHE",
            "DS_BUILD_CPU_ADAM",
            "DS_ACCELERATOR",
            "VLLM_PLUGINS",
            "TOKENIZERS_PARALLELISM",
            "LD_PRELOAD",
            "PPOFLOW_HOME",
        ),
    ],
)
def test_what_programs_need_is_there(name: str) -> None:
    assert permitted({name: "1"}) == {name: "1"}


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN", "HF_TOKEN_PATH", "VLLM_API_KEY", "VLLM_API_KEYS", "PYTHON_KEYRING_PASSWORD", "TORCH_AUTH"),
        *("DS_SECRET", "AWS_PROFILE", "AWS_SECRET_ACCESS_KEY", "PREFECT_API_URL", "MLFLOW_TRACKING_URI", "RAY_ADDRESS"),
        *(
            "DS_PASS",
            "PYTHON_KEYRING_PASS",
            "HF_PAT",
            "TORCH_PWD",
            "PYTHON_DB_DSN",
            "DS_CONNECTION_STRING",
        ),
        *(
            "HF_TOKEN2",
            "HF_APIKEY1",
            "HF_KEYS2",
            "VLLM_PASSWORD1",
            "HF_BEARER",
            "HF_HUB_COOKIE",
            "NCCL_JWT",
            "TORCH_PAT2",
        ),
        *("VLLM_HTTP_HEADERS", "VLLM_AUTHORIZATION", "VLLM_LOGIN", "DS_LOGIN", "DS_WEBHOOK", "HF_HOME", "HF_OTHER"),
        *("PGPASSFILE", "PPOFLOW_STORE", "PPOFLOW_REWARD_ENV", "PPOFLOW_STACK_MARK", "MY_SECRET", "DATABASE_URL", "X"),
    ],
)
def test_secrets_and_what_no_engine_needs_are_not(name: str) -> None:
    assert permitted({name: "1"}) == way_out({name: "1"}) == {}


def test_addresses_with_a_login_are_not_passed_on() -> None:
    assert is_secret("HF_ENDPOINT", "https://me:password@hub/x")
    assert is_secret("HF_ENDPOINT", "https://me:pass/word@hub")
    assert is_secret("HF_ENDPOINT", "https://token@hub")
    for sound in ("https://hub/a@b", "http://hub:80/a@b", "https://hub/?design=2&assign=3"):
        assert not is_secret("HF_ENDPOINT", sound)
    for query in ("sig=abc", "a=b&X-Amz-Signature=abc", "access_token=abc", "api-key=abc"):
        assert is_secret("HF_ENDPOINT", f"https://hub/?{query}")
    assert not is_secret("HF_ENDPOINT", "https://hub/?region=eu")
    proxies = {"HTTPS_PROXY": "http://proxy:1", "https_proxy": "http://me@proxy:1", "ALL_PROXY": "me:word@proxy:1"}
    assert way_out(proxies) == {"HTTPS_PROXY": "http://proxy:1"}


@pytest.mark.parametrize(
    ("environment", "upper", "lower"),
    [
        ({"ALL_PROXY": "socks5://proxy"}, "here,there", "here,there"),
        ({"http_proxy": "p", "no_proxy": "a, there", "NO_PROXY": "b"}, "b,here,there", "a,there,here"),
        ({"http_proxy": "p", "NO_PROXY": "b", "no_proxy": ""}, "b,here,there", "b,here,there"),
        ({"https_proxy": "p", "NO_PROXY": "*"}, "*", "*"),
    ],
)
def test_hosts_that_no_proxy_is_asked_for_join_the_users_own(
    environment: dict[str, str], upper: str, lower: str
) -> None:
    wanted = {"NO_PROXY": upper, "no_proxy": lower}
    assert around_proxies(environment, ["here", "there"]) == wanted
    assert around_proxies({**environment, **wanted}, ["here", "there"]) == wanted


def test_without_a_proxy_nothing_is_set() -> None:
    assert around_proxies({"http_proxy": "", "NO_PROXY": "a"}, ["here"]) == {}
