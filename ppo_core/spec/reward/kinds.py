"""The kinds of rewards that a spec can name, with their keys; those that are rules are in `rules.py`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from string import Formatter
from typing import Annotated, Any, Literal, Self
from urllib.parse import parse_qsl, urlsplit

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from ppo_core.spec.paths import ModelPath
from ppo_core.spec.reward.rules import (
    AnyReward,
    ExactMatchSpec,
    FormatSpec,
    JsonSchemaSpec,
    LengthSpec,
    NumberSpec,
    RegexSpec,
    UnitTestsSpec,
)
from ppo_core.spec.section import NonNegative

RUBRIC_FIELDS = ("prompt", "response", "answer")
NAME_OF_A_KEY = re.compile("(?i)(^|[_-])(key|apikey|token|secret|password|passwd|signature|sig|auth)$")
NAME_OF_A_SECRET = re.compile(
    "(?i)(^|[_-])(apikey|secret|password|passwd|passphrase|authorization|bearer|credentials?)[0-9]*$"
    "|(^|[_-])(access|admin|api|auth|bearer|client|hf|hub|openai|private|secret|service)[_-]?(key|token)[0-9]*$"
)
"""No key of a mapping and no token of a text is called so."""
STORED = "which would be stored in the records of runs: put the key into an environment variable"
WHERE_KEYS_GO = f"{STORED}, and its name into key_variable"


def without_keys(options: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
    """The options of a function; raises ValueError where a text among them looks like a key by its name."""
    found = next(_keys_in(options), None) if info.context else None  # a run's record may be older than this rule
    if found is not None:
        raise ValueError(
            f"what looks like a key ({found}) is an option, {STORED} that PPOFLOW_REWARD_ENV names, and read it in the "
            "function; give the option another name if it is none"
        )
    return options


def _keys_in(given: Any) -> Iterator[str]:
    for name, value in given.items() if isinstance(given, dict) else enumerate(given):
        if isinstance(value, dict | list):
            yield from _keys_in(value)
        elif isinstance(value, str) and NAME_OF_A_SECRET.search(str(name)):
            yield str(name)


Options = Annotated[dict[str, Any], AfterValidator(without_keys)]


class FunctionRewardSpec(AnyReward):
    """A Python function in the form of TRL's GRPO rewards, or in that of verl, OpenRLHF or verifiers."""

    kind: Literal["function"] = Field("function", description="This kind")
    function: str = Field(description="Your function, as package.module:function or path/to/file.py:function")
    options: Options = Field(default_factory=dict, description="Extra keyword arguments of the function")
    timeout_s: PositiveFloat | None = Field(
        None,
        description="Seconds that one call of a coroutine function may take, below engines.reward_timeout_s; then "
        "its sample has no score. none: no limit but that one, which ends the engine",
    )
    retries: NonNegativeInt = Field(
        1,
        le=20,
        description="How often a function that is called for each sample is called again, after a pause, for those "
        "that it raised for; not for errors of the code itself, such as TypeError",
    )
    while_sampling: bool = Field(
        False,
        description="Score responses as they are finished, while others are sampled: for a slow function whose score "
        "of a sample does not depend on the others in its batch",
    )

    @field_validator("function")
    @classmethod
    def _names_a_function(cls, name: str) -> str:
        if name.count(":") != 1 or not all(name.split(":")):
            raise ValueError(f"{name!r} is not a function: write package.module:function or path/to/file.py:function")
        return name

    @property
    def component(self) -> str:
        """`rewards.py:correct` -> `correct`."""
        return self.name or self.function.rpartition(":")[2]

    @property
    def label(self) -> str:
        """Its import path."""
        return self.function

    @property
    def code(self) -> tuple[str, ...]:
        """Itself."""
        return (self.function,)

    @property
    def sample_by_sample(self) -> bool:
        """As its owner says."""
        return self.while_sampling


class _Endpoint(AnyReward):
    """A server that is asked over HTTP."""

    url: str = Field(description="Address of the server, http:// or https://")
    key_variable: str | None = Field(
        None,
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="Environment variable that holds the API key; PPOFLOW_REWARD_ENV must name it",
    )
    concurrency: PositiveInt = Field(32, le=1024, description="Most requests in flight at a time")
    timeout_s: PositiveFloat = Field(60.0, description="Seconds to wait for the answer to a request")
    retries: NonNegativeInt = Field(
        4, le=20, description="How often a failed request is sent again, with growing pauses"
    )

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, url: str) -> str:
        try:
            parts = urlsplit(url)
            known = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:
            known = False
        if not known:
            raise ValueError(f"{url!r} is not an HTTP address: write http://host:port/path or https://host/path")
        if "@" in parts.netloc:
            raise ValueError(f"the url holds a login, {WHERE_KEYS_GO}")
        keys = [name for name, _ in parse_qsl(parts.query, keep_blank_values=True) if re.search(NAME_OF_A_KEY, name)]
        if keys:
            raise ValueError(f"the url holds what looks like a key ({keys[0]}), {WHERE_KEYS_GO}")
        return url

    @property
    def label(self) -> str:
        """Its kind and address."""
        return f"{vars(self)['kind']} {self.url}"

    @property
    def component(self) -> str:
        """Its kind, unless it has a name."""
        return self.name or str(vars(self)["kind"])

    @property
    def sample_by_sample(self) -> bool:
        """Always."""
        return True


class HttpRewardSpec(_Endpoint):
    """A server of the user's that scores batches of samples; docs/rewards.md has the form of request and response."""

    kind: Literal["http"] = Field("http", description="This kind")
    batch_size: PositiveInt = Field(16, description="Samples per request")


class JudgeSpec(_Endpoint):
    """A language model behind an OpenAI-compatible server that reads a rubric and ends its answer with a score."""

    kind: Literal["judge"] = Field("judge", description="This kind")
    url: str = Field(description="Base address of the API, for example http://127.0.0.1:8000/v1")
    model: str = Field(min_length=1, description="Name of the judge's model on the server")
    rubric: str = Field(
        description="Prompt of the judge, with {prompt}, {response} and optionally {answer}; it must ask for a last "
        "line `Score: NUMBER`"
    )
    lowest: float = Field(0.0, description="Lowest valid score; anything below counts as unscored")
    highest: float = Field(10.0, description="Highest valid score; anything above counts as unscored")
    temperature: NonNegative = Field(0.0, description="Sampling temperature of the judge")
    max_tokens: PositiveInt = Field(512, description="Longest answer of the judge, in tokens")

    @field_validator("rubric")
    @classmethod
    def _has_its_fields(cls, rubric: str) -> str:
        try:
            fields = [field for field in Formatter().parse(rubric) if field[1] is not None]
        except ValueError as error:
            raise ValueError(f"the rubric has unbalanced braces ({error}): write {{{{ or }}}} for a brace") from None
        names = {str(name) for _, name, _, _ in fields}
        if odd := [name for _, name, form, conversion in fields if form or conversion]:
            raise ValueError(f"the rubric has a format or conversion after {odd[0]}: write {{{odd[0]}}} alone")
        if unknown := names - set(RUBRIC_FIELDS):
            raise ValueError(
                f"the rubric has the unknown field {{{min(unknown)}}}: use "
                f"{', '.join(f'{{{name}}}' for name in RUBRIC_FIELDS)}; write {{{{ and }}}} for braces"
            )
        if "response" not in names:
            raise ValueError("the rubric has no {response}, so the judge would not see what to score: add it")
        return rubric

    @model_validator(mode="after")
    def _has_a_base_address(self) -> Self:
        if set(self.url) & set("?#"):
            raise ValueError(
                f"{self.url!r} is not a base address: /chat/completions is appended to it, so leave out ? and #"
            )
        return self

    @model_validator(mode="after")
    def _has_a_range(self) -> Self:
        if self.lowest >= self.highest:
            raise ValueError(f"lowest={self.lowest:g} must be less than highest={self.highest:g}")
        return self


class ModelRewardSpec(AnyReward):
    """A reward model: a Hugging Face sequence classifier with one label, which reads prompt and response."""

    kind: Literal["model"] = Field("model", description="This kind")
    path: ModelPath = Field(
        description="Folder of the reward model with its tokenizer, relative to the spec; or its hf:// name"
    )
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Data type that the reward model computes in")
    microbatch_tokens: PositiveInt = Field(
        4096, description="Most tokens per forward pass of the reward model, padding included"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where the reward model computes; auto: on a GPU where there is one"
    )
    num_ranks: PositiveInt = Field(
        1,
        le=256,
        description="Processes that share the weights of the reward model among them (ZeRO-3); on GPUs each has one",
    )

    @property
    def label(self) -> str:
        """Its kind and folder."""
        return f"model {self.path}"

    @property
    def component(self) -> str:
        """Its kind, unless it has a name."""
        return self.name or "model"

    @property
    def folders(self) -> tuple[str, ...]:
        """Its own."""
        return (self.path,)


RewardKind = Annotated[
    FunctionRewardSpec
    | ExactMatchSpec
    | NumberSpec
    | RegexSpec
    | LengthSpec
    | FormatSpec
    | JsonSchemaSpec
    | UnitTestsSpec
    | HttpRewardSpec
    | JudgeSpec
    | ModelRewardSpec,
    Field(discriminator="kind", description="A reward"),
]
