"""Oracles in plain torch, sequence by sequence, token by token, written from the papers. They call none of our code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Pairs = Sequence[tuple[list[int], list[int]]]


def plain_distributions(model: Any, prompt: list[int], response: list[int], temperature: float) -> Tensor:
    """float64 log-softmax [R, V] of the distribution before each response token: the full logits of one sequence."""
    logits = model(input_ids=torch.tensor([[*prompt, *response]])).logits[0].double()
    return torch.log_softmax(logits[len(prompt) - 1 : -1] / temperature, dim=-1)


def padded(rows: list[Tensor], width: int) -> Tensor:
    return torch.stack([torch.cat([row, row.new_zeros(width - len(row))]) for row in rows])


def plain_logprobs(model: Any, sequences: Pairs, temperature: float) -> Tensor:
    """[B, R] in float64, zeros past the end."""
    rows = []
    for prompt, response in sequences:
        table = plain_distributions(model, prompt, response, temperature)
        rows.append(torch.stack([table[t, token] for t, token in enumerate(response)]) if response else table.sum(1))
    return padded(rows, max(len(response) for _, response in sequences))


def plain_entropy(model: Any, sequences: Pairs, temperature: float) -> Tensor:
    """[B, R] in float64: -sum p log p."""
    tables = [plain_distributions(model, prompt, response, temperature) for prompt, response in sequences]
    return padded([-(t.exp() * t).sum(1) for t in tables], max(len(response) for _, response in sequences))


def plain_values(trunk: Any, head: Tensor, sequences: Pairs) -> tuple[Tensor, Tensor]:
    """Values [B, R] of the states before each response token, and [B] after the last one, in float64."""
    rows, final = [], []
    for prompt, response in sequences:
        hidden = trunk(input_ids=torch.tensor([[*prompt, *response]])).last_hidden_state[0].double()
        values = hidden @ head.double().flatten()
        rows.append(values[len(prompt) - 1 : -1])
        final.append(values[-1])
    return padded(rows, max(len(response) for _, response in sequences)), torch.stack(final)


Terms = list[tuple[int, Tensor]]
FIXED_LENGTH = 12


def plain_mean(terms: Terms, aggregation: str) -> Tensor:
    """Of (row, term) pairs, one per token that counts: over tokens, or over rows of their sums or their means."""
    if aggregation == "token_mean":
        return torch.stack([term for _, term in terms]).mean()
    rows = [torch.stack([term for row, term in terms if row == b]) for b in sorted({row for row, _ in terms})]
    parts = [row.mean() if aggregation == "sequence_mean_token_mean" else row.sum() for row in rows]
    return torch.stack(parts).mean() / (FIXED_LENGTH if aggregation == "fixed_length" else 1)


def plain_policy_loss(logprobs: Tensor, experience: Any, update: Any, entropy: Tensor) -> Tensor:
    """Schulman et al. 2017, equations 7 and 9, with the dual clip of Ye et al. 2020; and a KL, weighed alike."""
    surrogate: Terms = []
    for b, t in experience.response_mask.nonzero().tolist():
        advantage = experience.advantages[b, t].double()
        ratio = (logprobs[b, t] - experience.old_logprobs[b, t].double()).exp()
        clipped = ratio.clamp(1 - update.clip_low, 1 + update.clip_high)
        objective = torch.min(ratio * advantage, clipped * advantage)
        if update.dual_clip is not None and advantage < 0:
            objective = torch.max(objective, update.dual_clip * advantage)
        weight = plain_importance(experience, update, b, t)
        surrogate.append((b, -weight * objective - update.entropy_coef * entropy[b, t]))
    terms, places = (
        plain_kl(logprobs, experience, update.kl_loss_estimator),
        experience.response_mask.nonzero().tolist(),
    )
    kl = [
        (b, plain_importance(experience, update, b, t) * term) for (b, t), (_, term) in zip(places, terms, strict=True)
    ]
    return plain_mean(surrogate, update.aggregation) + update.kl_loss_coef * plain_mean(kl, update.aggregation)


def plain_penalised_loss(logprobs: Tensor, experience: Any, update: Any, coef: float) -> Tensor:
    """Schulman et al. 2017, equation 8: -(rho A - coef KL), KL(old, new) as rho - 1 - log rho at the old's tokens."""
    terms: Terms = []
    for b, t in experience.response_mask.nonzero().tolist():
        log_ratio = logprobs[b, t] - experience.old_logprobs[b, t].double()
        kl = log_ratio.exp() - 1 - log_ratio
        terms.append((b, coef * kl - log_ratio.exp() * experience.advantages[b, t].double()))
    return plain_mean(terms, update.aggregation)


def plain_imitation(logprobs: Tensor, experience: Any) -> Tensor:
    """Yue et al. 2025, section 4.3: the mean of -log policy over the tokens of the responses that are imitated."""
    places = experience.response_mask.nonzero().tolist()
    return torch.stack([-logprobs[b, t] for b, t in places if experience.imitated[b]]).mean()


def plain_importance(experience: Any, update: Any, b: int, t: int) -> float:
    """Trainer's over sampler's probability: of the token or of the response, cut, or left out."""
    kind, difference = update.importance_correction, (experience.old_logprobs - experience.sampler_logprobs).double()
    if kind == "none":
        return 1.0
    if kind == "sequence":
        tokens = [float(difference[b, s]) for s in range(difference.shape[1]) if experience.response_mask[b, s]]
        return min(math.exp(sum(tokens)), update.importance_cap)
    ratio = math.exp(float(difference[b, t]))
    if kind == "mask":
        return ratio if update.importance_floor <= ratio <= update.importance_cap else 0.0
    return min(ratio, update.importance_cap)


def plain_kl(logprobs: Tensor, experience: Any, estimator: str) -> Terms:
    """r^2 / 2 or exp(r) - 1 - r, with r = log reference - log policy."""
    terms: Terms = []
    for b, t in experience.response_mask.nonzero().tolist():
        r = experience.reference_logprobs[b, t].double() - logprobs[b, t]
        terms.append((b, r * r / 2 if estimator == "k2" else r.exp() - 1 - r))
    return terms


def plain_value_loss(values: Tensor, experience: Any, update: Any) -> Tensor:
    """Half the squared error, the larger of clipped and not."""
    terms: Terms = []
    for b, t in experience.response_mask.nonzero().tolist():
        target, old = experience.returns[b, t].double(), experience.values[b, t].double()
        error = (values[b, t] - target) ** 2
        if update.value_clip is not None:
            near = torch.minimum(torch.maximum(values[b, t], old - update.value_clip), old + update.value_clip)
            error = torch.max(error, (near - target) ** 2)
        terms.append((b, error / 2))
    return plain_mean(terms, update.aggregation)
