"""The rollout engine: vLLM, kept warm; new weights are swapped in place.

Jobs: prepare_sampling; generate_rollouts; the same in parts, generate_shard and merge_rollouts; sample; make_room.

Token ids in, token ids out, with the logprobs of the distribution that was really sampled. Every request has its own
seed, so tokens do not depend on batch order, batch size or which process answers.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ppo_core.data.tables import longest_prompt, read_rollouts, rollout_facts, write_rollouts
from ppo_core.engines.drawing import drawn, sampling_of
from ppo_core.engines.finished import FinishedResponses
from ppo_core.engines.rollout_limits import check_room, check_stop_tokens, stored_dtype, weights_folder
from ppo_core.engines.vllm_engine import SPARED, start_vllm
from ppo_core.processes.children import ChildWatch
from ppo_core.processes.lean_imports import absent, leave_out_unused, quick_imports
from ppo_core.processes.permissions import Permissions, permissions_of
from ppo_core.processes.protocol import EngineDefect, Job, serve, take_over_stdout
from ppo_core.processes.turns import TAKE_TURNS, SleepingModel, room_made
from ppo_core.records import GenerateJob, GenerateShardJob, InputError, PromptRow, RolloutRow, SamplingJob
from ppo_core.sampling import Draw, draws
from ppo_core.spec import ModelSpec

TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "generation_config.json")
UNTRAINED = "untrained"
"""In place of the digest of a policy."""
Keep = Callable[[int, Any], None]
"""Takes the number of a request, from 0, and vLLM's output for it."""


class RolloutEngine:
    """Holds one vLLM engine and the digest of the policy in it."""

    def __init__(self, permissions: Permissions, *, takes_turns: bool = False) -> None:
        self._trusted = permissions.trust_remote_code
        self._takes_turns = takes_turns
        self._llm: Any = None
        self._sleep: SleepingModel | None = None
        self._watch = ChildWatch([])
        self._shape: tuple[Any, ...] | None = None
        self._digest: str | None = None
        self._tokenizer: Any = None
        self._stop_ids: list[int] = []
        self._text_files: tuple[bytes, ...] | None = None

    def prepare_sampling(self, job: Job) -> dict[str, Any]:
        """Start vLLM around the model that a run begins with: the first policy is then swapped in, as all later ones.

        Writes that model as the training engine would: policies are swapped only where their config.json is the same.
        """
        from ppo_core.data.tokenization import load_tokenizer
        from ppo_core.models.loading import save_policy, starting_policy
        from ppo_core.processes.vector_math import prepare_vector_math

        if self._llm is not None:
            return {}
        prepare_vector_math()
        spec, inputs = SamplingJob.model_validate(job.spec), job.inputs
        folder = inputs["model"].path if "model" in inputs else None
        try:
            tokenizer = load_tokenizer(inputs["tokenizer"].path, trust_remote_code=self._trusted)
            policy = starting_policy(spec.model, folder, tokenizer, seed=0, trust_remote_code=self._trusted)
            save_policy(policy, {name: p.detach() for name, p in policy.named_parameters()}, tokenizer, job.output)
            del policy
            self._hold(job.output, UNTRAINED, spec, needed_context(inputs["dataset"].path, spec))
        except Exception as error:
            # What is left of a vLLM that did not start could trouble the next one, whose job has to say what is wrong.
            raise EngineDefect(f"{type(error).__name__}: {error}") from error
        return {}

    def generate_rollouts(self, job: Job) -> dict[str, Any]:
        """Write `rollouts.parquet`: one row per (prompt, sample)."""
        spec = GenerateJob.model_validate(job.spec)
        return self._generate_part(spec, 0, spec.num_prompts, job)

    def generate_shard(self, job: Job) -> dict[str, Any]:
        """Write `rollouts.parquet` with the rows of a part of the prompts."""
        shard = GenerateShardJob.model_validate(job.spec)
        return self._generate_part(shard.whole, shard.first, shard.count, job)

    def _generate_part(self, spec: GenerateJob, first: int, count: int, job: Job) -> dict[str, Any]:
        checkpoint, dataset = job.inputs["checkpoint"], job.inputs["dataset"].path
        prompts, wanted = drawn(dataset, spec)
        digest = checkpoint.digest if spec.weights == "policy" else f"{checkpoint.digest}/{spec.weights}"
        self._hold(weights_folder(checkpoint.path, spec), digest, spec, needed_context(dataset, spec))
        mine = wanted[first * spec.samples_per_prompt : (first + count) * spec.samples_per_prompt]
        return _write(self._generate(prompts, mine, spec, job), job)

    def sample(self, job: Job) -> dict[str, Any]:
        """Answers to one prompt given as text, or with `chat` as a user's message; writes nothing."""
        from ppo_core.data.tokenization import encode_prompt, load_tokenizer

        policy, wish = job.inputs["policy"], job.spec
        tokenizer, question = load_tokenizer(policy.path, trust_remote_code=self._trusted), wish["prompt"]
        if wish.get("chat"):
            if not tokenizer.chat_template:
                raise InputError("--chat: the policy's tokenizer has no chat template; leave --chat out")
            question = [{"role": "user", "content": question}]
        ids = encode_prompt(tokenizer, question)
        check_room(policy.path, ids, wish["max_tokens"], trust_remote_code=self._trusted)
        spec = GenerateJob(
            seed=wish["seed"],
            stream="sample",
            split="eval",
            position=0,
            num_prompts=1,
            shuffle=False,
            samples_per_prompt=wish["count"],
            max_response_tokens=wish["max_tokens"],
            temperature=wish["temperature"],
            model=ModelSpec(path=str(policy.path), dtype=stored_dtype(policy.path)),
            kv_cache_gib=1.0,
            tensor_parallel_size=1,
        )
        prompt = PromptRow("sample", question, ids, None, {})
        self._hold(policy.path, policy.digest, spec, len(ids) + spec.max_response_tokens)
        rows = self._generate(
            {0: prompt}, draws([0], {0: "sample"}, wish["count"], seed=spec.seed, stream="sample"), spec, job
        )
        return {"responses": [row.response for row in rows]}

    def make_room(self, job: Job) -> dict[str, Any]:
        """Free what other engines need, until the next job."""
        try:
            return room_made(0 if self._sleep is None else self._sleep.sleep())
        except Exception as error:
            # It still has its memory, which the next engine would lack.
            raise EngineDefect(f"vLLM did not go to sleep: {type(error).__name__}: {error}") from error

    def _generate(
        self, prompts: dict[int, PromptRow], wanted: list[Draw], spec: GenerateJob, job: Job
    ) -> list[RolloutRow]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        check_stop_tokens(spec.stop_token_ids, len(self._tokenizer))
        salt, sampled = str(self._digest), {row: sampling_of(prompt, spec) for row, prompt in prompts.items()}
        requests = [{"prompt_token_ids": prompts[draw.row].prompt_token_ids, "cache_salt": salt} for draw in wanted]
        parameters = [
            SamplingParams(
                temperature=sampled[draw.row].temperature,
                seed=draw.seed,
                max_tokens=sampled[draw.row].max_tokens,
                logprobs=0,
                flat_logprobs=True,
                stop_token_ids=sorted({*self._stop_ids, *spec.stop_token_ids}),
                stop=list(spec.stop),
                include_stop_str_in_output=True,
                detokenize=bool(spec.stop),
                output_kind=RequestOutputKind.FINAL_ONLY,  # else each step copies what every request has so far
                skip_clone=True,  # no other request has it
            )
            for draw in wanted
        ]
        finished, unreadable = FinishedResponses(job, len(wanted)), list[Exception]()

        def keep(number: int, output: Any) -> None:
            try:
                finished.add(number, self._row(prompts[wanted[number].row], wanted[number], output))
            except Exception as error:
                unreadable.append(error)  # not vLLM's: it goes on to the end of its requests

        self._run(requests, parameters, keep, finished.tell)
        if unreadable:
            raise unreadable[0]
        rows = finished.all()
        if spec.temperature_column is None:
            return rows
        own = [sampled[draw.row].temperature for draw in wanted]
        return [replace(row, temperature=temperature) for row, temperature in zip(rows, own, strict=True)]

    def _run(self, requests: list[Any], parameters: list[Any], keep: Keep, tell: Callable[[], None]) -> None:
        """All requests through continuous batching; keeps each as it finishes, and tells of it after each step."""
        try:
            self._finish(requests, parameters, keep, tell)
        except Exception as error:
            # Requests of this job may still be in the engine, and the next job would get their answers.
            raise EngineDefect(f"vLLM failed with {type(error).__name__}: {error}") from error

    def _finish(self, requests: list[Any], parameters: list[Any], keep: Keep, tell: Callable[[], None]) -> None:
        engine = self._llm.llm_engine
        for number, (request, parameter) in enumerate(zip(requests, parameters, strict=True)):
            engine.add_request(str(number), request, parameter)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    keep(int(output.request_id), output)
            tell()

    def _row(self, prompt: PromptRow, draw: Draw, output: Any) -> RolloutRow:
        from ppo_core.data.tokenization import decode_response

        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        return RolloutRow(
            prompt_id=prompt.prompt_id,
            sample_index=draw.sample_index,
            prompt_token_ids=prompt.prompt_token_ids,
            response_token_ids=tokens,
            response=decode_response(self._tokenizer, tokens),
            sampler_logprobs=sampled_logprobs(completion.logprobs, len(tokens)),
            finish_reason=completion.finish_reason,
        )

    def _weights_gone(self) -> bool:
        """Wakes vLLM; whether it slept without its weights."""
        try:
            return self._sleep is not None and self._sleep.wake()
        except Exception as error:
            raise EngineDefect(f"vLLM did not wake up: {type(error).__name__}: {error}") from error

    def _hold(self, policy: Path, digest: str, spec: SamplingJob, context: int) -> None:
        """Have the policy of `digest` in vLLM: by a swap where the engine can stay, else by a new engine."""
        from ppo_core.data.tokenization import load_tokenizer, stop_token_ids

        shape = (
            (policy / "config.json").read_text(),
            spec.model.dtype,
            spec.compute_dtype,
            spec.kv_cache_gib,
            spec.tensor_parallel_size,
            bool(spec.stop),
        )
        if self._llm is None or self._shape is None or self._shape[1:] != shape or self._shape[0] < context:
            self._watch.retire()
            self._llm, self._sleep, self._digest = None, None, None
            self._llm, self._sleep = start_vllm(
                policy, spec, context, trust_remote_code=self._trusted, takes_turns=self._takes_turns
            )
            # vLLM's core has a process of its own on GPUs, and `step` waits for it also when it is dead.
            self._watch = ChildWatch(multiprocessing.active_children())
            self._shape, self._digest = (context, *shape), digest
        elif self._weights_gone() or self._digest != digest:
            self._digest = None
            self._llm.collective_rpc("swap_weights", args=(str(policy),))
            self._llm.reset_prefix_cache()
            self._digest = digest
        text = tuple((policy / name).read_bytes() for name in TEXT_FILES if (policy / name).is_file())
        if text != self._text_files:  # a large tokenizer takes a second to load, and hardly ever changes
            self._tokenizer = load_tokenizer(policy, trust_remote_code=self._trusted)
            self._stop_ids = stop_token_ids(self._tokenizer, policy)
            self._text_files = text


def sampled_logprobs(logprobs: Any, count: int) -> list[float]:
    """The sampled token's logprob at each position, from vLLM's flat form."""
    if count == 0:
        return []
    return [float(logprobs.logprobs[start]) for start in logprobs.start_indices[:count]]


def needed_context(dataset: Path, spec: SamplingJob) -> int:
    """Room for the longest prompt of all splits: going from one to the other must not start a second vLLM engine."""
    splits = [path for path in (dataset / "train.parquet", dataset / "eval.parquet") if path.is_file()]
    return max(longest_prompt(path) for path in splits) + spec.max_response_tokens


def merge_rollouts(job: Job) -> dict[str, Any]:
    """Write `rollouts.parquet` out of those of the inputs shard_0, shard_1, …: as if one engine had sampled them."""
    shards = [job.inputs[f"shard_{number}"].path for number in range(len(job.inputs))]
    return _write([row for shard in shards for row in read_rollouts(shard / "rollouts.parquet")], job)


def _write(rollouts: list[RolloutRow], job: Job) -> dict[str, Any]:
    write_rollouts(job.output / "rollouts.parquet", rollouts)
    return rollout_facts(rollouts)


def main() -> None:
    """Serve rollout jobs on standard input and output."""
    replies = take_over_stdout()
    with quick_imports():
        leave_out_unused()
        # Seconds: better now, while the flow does other things, than in the first job. `import vllm` alone leaves half.
        with absent(*SPARED):
            from vllm import LLM, SamplingParams  # noqa: F401

    permissions = permissions_of([argument for argument in sys.argv[1:] if argument != TAKE_TURNS])
    engine = RolloutEngine(permissions, takes_turns=TAKE_TURNS in sys.argv)
    generating = (engine.prepare_sampling, engine.generate_rollouts, engine.generate_shard, merge_rollouts)
    jobs = (*generating, engine.sample, engine.make_room)
    serve({job.__name__: job for job in jobs}, replies, permissions)


if __name__ == "__main__":
    main()
