"""Policy, critic and reference: made, loaded and saved as ordinary Hugging Face folders."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ppo_core.data.tokenization import REMOTE_CODE, model_config, shortened
from ppo_core.models.architectures import trunk_width
from ppo_core.models.precision import in_own_precision
from ppo_core.records import InputError, needs_own_code
from ppo_core.spec import ModelSpec

HEAD = "score.weight"
"""What transformers calls that of most sequence classifiers."""
VALUE_HEAD = "value_head.safetensors"
INSIDE_POLICY = "ppo_value_head"
FROM_A_COPY = "Take the checkpoint from a copy, or an earlier one"
OTHER_WEIGHTS = ("mismatched", "missing", "unexpected")
# What transformers raises for a folder that holds no such model. Not RuntimeError: a GPU without memory raises that.
BAD_FOLDER = (OSError, ValueError, KeyError, ImportError, AttributeError, SafetensorError)


class Critic(nn.Module):
    """The policy's architecture without its output embedding, with a scalar head that starts at zero."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.backbone = backbone
        self.value_head = nn.Linear(trunk_width(backbone.config), 1, bias=False, dtype=backbone.dtype)
        nn.init.zeros_(self.value_head.weight)

    def forward(self, input_ids: Tensor, **options: Any) -> Tensor:
        """Values `[B, T]` of the states after each token of `input_ids` `[B, T]`; `options` are for the trunk."""
        hidden = self.backbone(input_ids=input_ids, use_cache=False, **options).last_hidden_state
        return in_own_precision(self.value_head, hidden)[..., 0]

    @property
    def config(self) -> Any:
        """The trunk's."""
        return self.backbone.config

    def gradient_checkpointing_enable(self, options: dict[str, Any]) -> None:
        """Recompute activations in the backward pass, as the method of transformers' models does."""
        self.backbone.gradient_checkpointing_enable(options)


def create_policy(config: dict[str, Any], *, vocab_size: int, seed: int, dtype: str) -> Any:
    """A new causal LM with the library's own initialisation, the same for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(
            model_config(None, config, vocab_size), trust_remote_code=False
        )
    # Parameters only: buffers such as the frequencies of rotary positions stay fp32, as when a folder is loaded.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch_dtype(dtype))
    model.config.dtype = torch_dtype(dtype)
    return prepared(model)


def starting_policy(
    spec: ModelSpec, folder: Path | None, tokenizer: Any, *, seed: int, trust_remote_code: bool = False
) -> Any:
    """The causal LM that a run begins with: that of the `folder`, else a new one for the tokenizer's words."""
    if folder is not None:
        return load_policy(folder, dtype=spec.dtype, trust_remote_code=trust_remote_code)
    config = {"eos_token_id": tokenizer.eos_token_id, **(spec.config or {})}
    return create_policy(config, vocab_size=len(tokenizer), seed=seed, dtype=spec.dtype)


def empty_policy(config: Any, name: str, *, trust_remote_code: bool = False) -> Any:
    """A causal LM without memory for its weights. Raises InputError, naming it `name`, where none can be made."""
    made_by = transformers.AutoModelForCausalLM
    return empty_model(made_by, "causal LM", config, name, trust_remote_code=trust_remote_code)


def empty_model(auto: Any, what: str, config: Any, name: str, *, trust_remote_code: bool) -> Any:
    """A model without memory for its weights, by `auto`, one of transformers' Auto classes.

    Raises InputError where it cannot be `what`, and for an architecture that has no causal LM.
    """
    _require_causal_lm(config, name, trust_remote_code=trust_remote_code)
    try:
        with torch.device("meta"):
            return auto.from_config(config, trust_remote_code=trust_remote_code)
    except Exception as error:
        said = f"{type(error).__name__}: {shortened(error)}"
        raise InputError(f"model {name}: transformers cannot make a {what} from this configuration ({said})") from error


def _require_causal_lm(config: Any, name: str, *, trust_remote_code: bool) -> None:
    """Raise InputError for a configuration of another type.

    transformers would list the hundreds of configurations that it has a causal LM for.
    """
    own_code = trust_remote_code and "auto_map" in config.to_dict()
    if not own_code and type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InputError(
            f"model {name}: {config.model_type} is not a type of causal LM: use one that generates text, such as llama "
            "or qwen2"
        )


def load_policy(path: str | Path, *, dtype: str, trust_remote_code: bool = False, exact: bool = False) -> Any:
    """A causal LM from a Hugging Face folder. Raises InputError saying why it cannot be one.

    With `exact`, as for what a checkpoint holds, also where the folder has weights that are no part of the model.
    """
    made_by, trusted = transformers.AutoModelForCausalLM, trust_remote_code
    return prepared(load_whole(made_by, "causal LM", path, dtype=dtype, trust_remote_code=trusted, exact=exact))


def load_whole(
    auto: Any, what: str, path: str | Path, *, dtype: str, trust_remote_code: bool, exact: bool = False
) -> Any:
    """A model from a Hugging Face folder by `auto`, one of transformers' Auto classes, with no weight missing.

    Raises InputError saying why it cannot be `what`; with `exact` also for weights that are no part of it.
    """
    loaded: Any
    try:
        loaded = auto.from_pretrained(
            str(path),
            dtype=torch_dtype(dtype),
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # else its error names none of them
            output_loading_info=True,
        )
    except BAD_FOLDER as error:
        if REMOTE_CODE in str(error):
            raise needs_own_code(path) from None
        found = f"({type(error).__name__}: {shortened(error)})"
        if exact:
            raise InputError(f"{path} cannot be loaded {found}: it is damaged. {FROM_A_COPY}") from error
        raise InputError(f"{path} is not a {what} that transformers can load {found}") from error
    model, found = loaded
    _refuse_other_weights(path, exact=exact, **{key: found[f"{key}_keys"] for key in OTHER_WEIGHTS})
    return model


def _refuse_other_weights(path: str | Path, *, mismatched: Any, missing: Any, unexpected: Any, exact: bool) -> None:
    """transformers would go on with random weights in their place, and leave out the unexpected."""
    problems = [
        f"{name} is {list(stored)} in the weights and {list(wanted)} by config.json"
        for name, stored, wanted in sorted(mismatched)
    ]
    problems += [f"{name} is not in the weights" for name in sorted(missing)]
    if exact:
        problems += [f"{name} is in the weights, and the model of config.json has none" for name in sorted(unexpected)]
    if HEAD in missing:
        raise InputError(
            f"{path} has no head that gives scores ({HEAD} is not in the weights), so it is not a reward model: train "
            "one of it with ppoflow reward-model"
        )
    if problems:
        more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        remedy = FROM_A_COPY if exact else "Take both from the same model"
        raise InputError(f"{path}: config.json and the weights do not match: {problems[0]}{more}. {remedy}")


def critic_from_policy(path: Path, *, dtype: str, trust_remote_code: bool = False) -> Critic:
    """A critic whose trunk is a copy of the policy's."""
    return Critic(prepared(load_policy(path, dtype=dtype, trust_remote_code=trust_remote_code).base_model))


def add_value_head(policy: Any) -> nn.Linear:
    """Give a causal LM a scalar head, zero at the start, which none of its own forward passes uses."""
    head = nn.Linear(trunk_width(policy.config), 1, bias=False, dtype=policy.dtype)
    nn.init.zeros_(head.weight)
    policy.add_module(INSIDE_POLICY, head)
    return head


def load_value_head(policy: Any, file: Path) -> None:
    """Give a causal LM the value head of a checkpoint. Raises InputError where there is none."""
    if not file.is_file():
        raise InputError(f"{file} is missing: the checkpoint was made by another algorithm, or is incomplete")
    _load_head(add_value_head(policy), file)


def load_critic(folder: Path, *, dtype: str, trust_remote_code: bool = False) -> Critic:
    """A critic as `save_critic` wrote it. Raises InputError where the folder has no such model, or more than that."""
    made_by, trusted = transformers.AutoModel, trust_remote_code
    backbone = load_whole(made_by, "critic", folder, dtype=dtype, trust_remote_code=trusted, exact=True)
    critic = Critic(prepared(backbone))
    _load_head(critic.value_head, folder / VALUE_HEAD)
    return critic


def _load_head(head: nn.Linear, file: Path) -> None:
    try:
        head.load_state_dict(load_file(file))
    except (SafetensorError, RuntimeError) as error:  # RuntimeError: another shape, or another name
        raise InputError(f"{file} is damaged ({shortened(error)}). {FROM_A_COPY}") from error


def save_policy(model: Any, weights: dict[str, Tensor], tokenizer: Any, folder: Path) -> None:
    """Write a folder that transformers and vLLM load as it is; `weights` are the full parameters by name."""
    _save_pretrained(model, weights, folder)
    tokenizer.save_pretrained(folder)


def save_critic(critic: Critic, weights: dict[str, Tensor], folder: Path) -> None:
    """Write the trunk as a Hugging Face folder (AutoModel loads it) and the head beside it."""
    trunk = {k.removeprefix("backbone."): v for k, v in weights.items() if k.startswith("backbone.")}
    _save_pretrained(critic.backbone, trunk, folder)
    head = {k.removeprefix("value_head."): v.contiguous() for k, v in weights.items() if k.startswith("value_head.")}
    save_file(head, folder / VALUE_HEAD)


def torch_dtype(name: str) -> torch.dtype:
    """`float32` or `bfloat16`."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def _save_pretrained(model: Any, weights: dict[str, Tensor], folder: Path) -> None:
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}  # adapters' too, which stay out
    buffers = {name: b for name, b in model.state_dict().items() if name not in parameters}
    tied = {name: weights[owner] for name, owner in _tied_names(model, weights).items()}
    state = {**buffers, **weights, **tied}
    if model.can_generate():
        model.generation_config = savable(model.generation_config)
    model.save_pretrained(folder, state_dict=state)


def savable(config: transformers.GenerationConfig) -> transformers.GenerationConfig:
    """As transformers writes it, which loads what it refuses to write. Settings of sampling without do_sample are taken
    for meant; where others are out of range, the tokens alone are kept that begin and end a text."""
    if is_savable(config):
        return config
    sampling = copy.deepcopy(config)
    sampling.do_sample = True
    if is_savable(sampling):
        return sampling
    return transformers.GenerationConfig(bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id)


def is_savable(config: transformers.GenerationConfig) -> bool:
    """Whether `save_pretrained` would write it."""
    try:
        config.validate(strict=True)
    except ValueError:
        return False
    return True


def _tied_names(model: Any, weights: dict[str, Tensor]) -> dict[str, str]:
    """Parameters that are another one under a second name, as `lm_head.weight` of tied embeddings."""
    owners = {id(parameter): name for name, parameter in model.named_parameters()}
    everywhere = model.named_parameters(remove_duplicate=False)
    return {name: owners[id(p)] for name, p in everywhere if name not in weights and owners[id(p)] in weights}


def prepared(model: Any) -> Any:
    """Without dropout: the ratio of two passes over the same tokens must be one when nothing was learned between."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        _silence(vars(module))
        # Some layers read the configuration at every pass, as Falcon's do; the model's own is the one that is saved.
        if "config" in vars(module) and not isinstance(module, transformers.PreTrainedModel):
            module.config = copy.copy(module.config)
            _silence(vars(module.config))
    return model.eval()


def _silence(attributes: dict[str, Any]) -> None:
    """Zero the rates by whatever name: dropout, attention_dropout, resid_pdrop, layerdrop."""
    attributes.update({name: 0.0 for name, rate in attributes.items() if "drop" in name and isinstance(rate, float)})
