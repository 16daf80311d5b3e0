"""TRL's PPOTrainer on a given policy and given prompts; a line of JSON for each iteration. Runs in TRL's environment.

    python trl_iterations.py FOLDER PROMPTS.json [--iterations 6] [--responses 256] [--epochs 2] [--length 48] [--bf16]
    python trl_iterations.py FOLDER PROMPTS.json --task REWARD.py HELD_OUT.json --learning-rate 1e-4 [...]

With a task it learns that: REWARD.py has `correct` and `answered_right` of texts and answers, the prompts' and those
held out come as rows {"ids": [...], "prompt": "…", "answer": "…"}, and every fifth iteration tells the held-out
accuracy. Without one the reward is a rule that nobody can learn. Imports nothing of ppoflow; `benchmarks.iteration` and
`benchmarks.learning` call it.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
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

EVERY = 5


class Task:
    """Prompts with answers, rewards by a function of texts, and the accuracy on prompts that are held out."""

    def __init__(
        self, tokenizer: Any, reward: Path, rows: list[dict[str, Any]], held_out: list[dict[str, Any]]
    ) -> None:
        self.functions = runpy.run_path(str(reward))
        self.tokenizer, self.held_out = tokenizer, held_out
        self.answers = {row["prompt"]: row["answer"] for row in rows}

    def scores(self, input_ids: Tensor) -> list[float]:
        """Of rows of prompt and response; a prompt ends with its first `=`."""
        texts = self.tokenizer.batch_decode(input_ids, skip_special_tokens=True)
        parts = [text.partition("=") for text in texts]
        prompts, completions = [f"{part[0]}=" for part in parts], [part[2] for part in parts]
        scores: list[float] = self.functions["correct"](prompts, completions, [self.answers[one] for one in prompts])
        return scores

    @torch.no_grad()
    def accuracy(self, policy: Any, length: int) -> float:
        """Sampled at temperature 1."""
        prompts, answers = ([row[name] for row in self.held_out] for name in ("prompt", "answer"))
        batch = self.tokenizer.pad({"input_ids": [row["ids"] for row in self.held_out]}, return_tensors="pt")
        options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        found = policy.generate(**batch, max_new_tokens=length, pad_token_id=self.tokenizer.pad_token_id, **options)
        texts = self.tokenizer.batch_decode(found[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        right = self.functions["answered_right"](prompts, texts, answers)
        return float(sum(right) / len(right))


class RuleBackbone(nn.Module):
    """TRL wants a reward network: this one scores by a rule or by a task, at every position."""

    def __init__(self, tokenizer: Any, task: Task | None) -> None:
        super().__init__()
        self.tokenizer, self.task = tokenizer, task

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> Any:
        """A score for each row, as the hidden state of each of its tokens."""
        if self.task is None:
            texts = self.tokenizer.batch_decode(input_ids)
            scores = torch.tensor([float(len(text) % 3 == 0) for text in texts])
        else:
            scores = torch.tensor(self.task.scores(input_ids))
        hidden = scores[:, None, None].expand(-1, input_ids.shape[1], 1)
        return BaseModelOutputWithPast(last_hidden_state=hidden, hidden_states=(hidden,))


class RuleReward(nn.Module):
    """The wrapping that TRL looks into."""

    base_model_prefix = "model"

    def __init__(self, tokenizer: Any, task: Task | None) -> None:
        super().__init__()
        self.model, self.score = RuleBackbone(tokenizer, task), nn.Identity()


class Clock(TrainerCallback):
    """When an iteration's parts began and ended; rollouts and the first forward pass with gradients tell them apart."""

    def __init__(self, tokenizer: Any, task: Task | None, length: int) -> None:
        self.marks: dict[str, float] = {}
        self.tokens, self.task, self.length = 0.0, task, length
        generate, forward = ppo_trainer.batch_generation, ppo_trainer.forward

        def timed_generate(*arguments: Any, **options: Any) -> Any:
            self.marks = {"began": time.perf_counter()}
            made = generate(*arguments, **options)
            self.marks["generated"] = time.perf_counter()
            ended = made[0][:, arguments[1].shape[1] :] == tokenizer.eos_token_id
            self.tokens = float((ended.cumsum(1) - ended.long() == 0).sum(1).float().mean())
            return made

        def timed_forward(*arguments: Any, **options: Any) -> Any:
            if torch.is_grad_enabled():
                self.marks.setdefault("updating", time.perf_counter())
            return forward(*arguments, **options)

        ppo_trainer.batch_generation, ppo_trainer.forward = timed_generate, timed_forward

    def on_step_end(self, _: Any, state: Any, __: Any, model: Any = None, **___: Any) -> None:
        """Print the iteration."""
        now, marks = time.perf_counter(), self.marks
        updating = marks.get("updating", now)  # without an epoch there is no update
        parts = {
            "rollout": marks["generated"] - marks["began"],
            "experience": updating - marks["generated"],
            "update": now - updating,
            "iteration": now - marks["began"],
            "tokens": self.tokens,
        }
        if self.task is not None and state.global_step % EVERY == 0:
            parts["accuracy"] = self.task.accuracy(model.policy, self.length)
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
        learning_rate=given.learning_rate,
        max_grad_norm=1.0,
        bf16=given.bf16,
        fp16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to="none",
        num_sample_generations=0,
        save_strategy="no",
        logging_steps=1,
        seed=given.seed,
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
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--task", type=Path, nargs=2, metavar=("REWARD.py", "HELD_OUT.json"))
    given = parser.parse_args()
    precision = "bf16" if given.bf16 else "no"
    os.environ["ACCELERATE_MIXED_PRECISION"] = precision  # PPOTrainer does not hand on what PPOConfig says
    torch.manual_seed(given.seed)

    tokenizer = AutoTokenizer.from_pretrained(given.folder, padding_side="left")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    prompts, task = json.loads(given.prompts.read_text()), None
    if given.task:
        task = Task(tokenizer, given.task[0], prompts, json.loads(given.task[1].read_text()))
        prompts = [row["ids"] for row in prompts]
    policy, reference = (AutoModelForCausalLM.from_pretrained(given.folder, dtype=torch.float32) for _ in range(2))
    critic = AutoModelForSequenceClassification.from_pretrained(given.folder, num_labels=1, dtype=torch.float32)
    clock = Clock(tokenizer, task, given.length)
    trainer = PPOTrainer(
        args=config_of(given),
        processing_class=tokenizer,
        model=policy,
        ref_model=reference,
        reward_model=RuleReward(tokenizer, task),
        value_model=critic,
        train_dataset=Dataset.from_dict({"input_ids": prompts}),
        callbacks=[clock],
    )
    if trainer.accelerator.mixed_precision != precision:
        raise RuntimeError(f"mixed precision is {trainer.accelerator.mixed_precision}, and {precision} was asked for")
    kept = ("DefaultFlowCallback", "Clock")  # the others print, or ask for packages
    trainer.callback_handler.callbacks = [c for c in trainer.callback_handler.callbacks if type(c).__name__ in kept]
    trainer.train()


if __name__ == "__main__":
    main()
