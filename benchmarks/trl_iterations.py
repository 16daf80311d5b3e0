"""TRL's PPOTrainer on a given policy and given prompts; a line of JSON for each iteration. Runs in TRL's environment.

    python trl_iterations.py FOLDER PROMPTS.json [--iterations 6] [--responses 256] [--epochs 2] [--length 48] [--bf16]

Imports nothing of ppoflow. `benchmarks.iteration` calls it.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback
from transformers.modeling_outputs import BaseModelOutputWithPast
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer


class RuleBackbone(nn.Module):
    """TRL wants a reward network: this one scores by a rule, at every position."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self.tokenizer = tokenizer

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> Any:
        """A score for each row, as the hidden state of each of its tokens."""
        texts = self.tokenizer.batch_decode(input_ids)
        scores = torch.tensor([float(len(text) % 3 == 0) for text in texts])
        hidden = scores[:, None, None].expand(-1, input_ids.shape[1], 1)
        return BaseModelOutputWithPast(last_hidden_state=hidden, hidden_states=(hidden,))


class RuleReward(nn.Module):
    """The wrapping that TRL looks into."""

    base_model_prefix = "model"

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self.model, self.score = RuleBackbone(tokenizer), nn.Identity()


class Clock(TrainerCallback):
    """When an iteration's parts began and ended; rollouts and the first forward pass with gradients tell them apart."""

    def __init__(self) -> None:
        self.marks: dict[str, float] = {}
        generate, forward = ppo_trainer.batch_generation, ppo_trainer.forward

        def timed_generate(*arguments: Any, **options: Any) -> Any:
            self.marks = {"began": time.perf_counter()}
            made = generate(*arguments, **options)
            self.marks["generated"] = time.perf_counter()
            return made

        def timed_forward(*arguments: Any, **options: Any) -> Any:
            if torch.is_grad_enabled():
                self.marks.setdefault("updating", time.perf_counter())
            return forward(*arguments, **options)

        ppo_trainer.batch_generation, ppo_trainer.forward = timed_generate, timed_forward

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Print the iteration."""
        now, marks = time.perf_counter(), self.marks
        updating = marks.get("updating", now)  # without an epoch there is no update
        parts = {
            "rollout": marks["generated"] - marks["began"],
            "experience": updating - marks["generated"],
            "update": now - updating,
            "iteration": now - marks["began"],
        }
        print(json.dumps(parts), flush=True)


def config_of(given: argparse.Namespace) -> PPOConfig:
    """As the example's spec has it."""
    return PPOConfig(
        output_dir="trl_out",
        per_device_train_batch_size=given.responses,
        gradient_accumulation_steps=1,
        num_mini_batches=4,
        num_ppo_epochs=given.epochs,
        total_episodes=given.iterations * given.responses,
        local_rollout_forward_batch_size=given.responses,
        response_length=given.length,
        stop_token="eos",
        temperature=1.0,
        kl_coef=0.01,
        vf_coef=0.5,
        cliprange_value=10.0,
        gamma=1.0,
        lam=0.95,
        learning_rate=1e-5,
        max_grad_norm=1.0,
        bf16=given.bf16,
        fp16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to="none",
        num_sample_generations=0,
        save_strategy="no",
        logging_steps=1,
        seed=0,
        disable_tqdm=True,
    )


def main() -> None:
    """As many iterations as are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--responses", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--length", type=int, default=48)
    parser.add_argument("--bf16", action="store_true")
    given = parser.parse_args()
    torch.manual_seed(0)

    tokenizer = AutoTokenizer.from_pretrained(given.folder, padding_side="left")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    prompts = Dataset.from_dict({"input_ids": json.loads(given.prompts.read_text())})
    policy, reference = (AutoModelForCausalLM.from_pretrained(given.folder, dtype=torch.float32) for _ in range(2))
    critic = AutoModelForSequenceClassification.from_pretrained(given.folder, num_labels=1, dtype=torch.float32)
    clock = Clock()
    trainer = PPOTrainer(
        args=config_of(given),
        processing_class=tokenizer,
        model=policy,
        ref_model=reference,
        reward_model=RuleReward(tokenizer),
        value_model=critic,
        train_dataset=prompts,
        callbacks=[clock],
    )
    kept = ("DefaultFlowCallback", "Clock")  # the others print, or ask for packages
    trainer.callback_handler.callbacks = [c for c in trainer.callback_handler.callbacks if type(c).__name__ in kept]
    trainer.train()


if __name__ == "__main__":
    main()
