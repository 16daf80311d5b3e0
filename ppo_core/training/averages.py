"""What follows the policy at a distance, from checkpoint to checkpoint: its average, and a reference that moves.

    average_k = decay * average_{k-1} + (1 - decay) * policy_k        once per iteration, in fp32; average_0 = policy_0

A checkpoint, full or policy-only, has each as a Hugging Face folder beside its policy, and the next is made of that
alone: no engine keeps any of it. Averages of weights: Kingma and Ba 2014 (arXiv:1412.6980), section 7.2; references
that move, by steps or as an average: Gorbatovski et al. 2024 (arXiv:2404.09656).
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, float32, nn

from ppo_core.models.loading import load_policy, save_policy
from ppo_core.processes.ranks import first_rank_only
from ppo_core.records import UpdatePolicyJob
from ppo_core.spec import AveragedReference, FixedReference, ReferenceSpec, SteppedReference
from ppo_core.training.checkpoint import EMA, full_weights
from ppo_core.training.learner import Learner

REFERENCE = "reference"


def write_averages(before: Path, after: Path, learner: Learner, job: UpdatePolicyJob) -> None:
    """Add to the checkpoint `after`, made of `before`, what the job averages of the policy that `learner` holds."""
    policy, ranks, reference = learner.trainables["policy"], learner.ranks, job.reference
    decays = {EMA: job.update.ema_decay} if job.update.ema_decay is not None else {}
    if isinstance(reference, AveragedReference):
        decays[REFERENCE] = reference.decay
    now = full_weights(policy, ranks, float32) if decays else {}
    if ranks.is_first:
        with first_rank_only():
            if isinstance(reference, SteppedReference):
                _step(before, after, taken=(job.iteration + 1) % reference.iterations == 0)
            for name, decay in decays.items():
                begun = before / name if (before / name).is_dir() else before / "policy"
                so_far = load_policy(begun, dtype="float32", trust_remote_code=learner.trust_remote_code)
                save_policy(policy.module, _average(so_far, now, decay), learner.tokenizer, after / name)
    ranks.barrier()


def reference_folder(checkpoint: Path, start: Path, spec: ReferenceSpec) -> Path:
    """Where the policy is that the one in `checkpoint` is kept close to: in `start` until the reference moves."""
    moved = checkpoint / REFERENCE
    return moved if not isinstance(spec, FixedReference) and moved.is_dir() else start / "policy"


def _step(before: Path, after: Path, *, taken: bool) -> None:
    """The policy as it is now becomes the reference, or that of the checkpoint before stays."""
    source = after / "policy" if taken else before / REFERENCE
    if source.is_dir():
        (after / REFERENCE).mkdir()
        for file in sorted(path for path in source.iterdir() if path.is_file()):
            shutil.copyfile(file, after / REFERENCE / file.name)


def _average(so_far: nn.Module, now: Mapping[str, Tensor], decay: float) -> dict[str, Tensor]:
    before = dict(so_far.named_parameters())
    return {name: before[name].detach().mul(decay).add_(weight, alpha=1 - decay) for name, weight in now.items()}
