"""PPO on a pole that stands on a cart: the numerics of `ppo_core`, a Gaussian policy, and no language model.

    python examples/continuous/balance.py [SEED]

To `ppo_core` an episode is what a response is: a row of `[B, R]`, whose mask is True until the pole falls; an episode
that is still up when time is over is a response that was cut, and goes on with the critic's value. GAE, whitening, the
clipped surrogate and the critic's loss are those that language models are trained with.

The cart: Barto, Sutton and Anderson 1983, "Neuronlike Adaptive Elements That Can Solve Difficult Learning Control
Problems", with a force of any size up to FORCE. A step is worth 1.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ppo_core.advantages import gae
from ppo_core.losses import policy_loss, value_loss
from ppo_core.masking import whiten

EPISODES, STEPS, SECONDS, FORCE = 64, 200, 0.02, 10.0
GRAVITY, CART, POLE, LENGTH = 9.8, 1.0, 0.1, 0.5  # of the pole, half
EDGE, FALLEN = 2.4, 0.21  # metres from the middle, radians from upright


class Episodes(NamedTuple):
    """`states` `[B, R + 1, 4]`, the rest `[B, R]`: what was done, how likely it was, and whether the pole was up."""

    states: Tensor
    actions: Tensor
    logprobs: Tensor
    mask: Tensor


class GaussianPolicy(nn.Module):
    """A force per state, as a share of FORCE: normal around what a small network says, one deviation for all states."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.log_std = network(), nn.Parameter(torch.tensor(-0.5))

    def at(self, states: Tensor) -> torch.distributions.Normal:
        """The distribution `[...]` at states `[..., 4]`."""
        return torch.distributions.Normal(self.mean(states)[..., 0], self.log_std.exp())


def network() -> nn.Module:
    """Of a state, one number, 0 at first."""
    layers = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    nn.init.zeros_(layers[-1].weight)
    nn.init.zeros_(layers[-1].bias)
    return layers


def step(states: Tensor, actions: Tensor) -> Tensor:
    """The states `[B, 4]` (place, speed, angle, its speed) a moment after forces `[B]`."""
    _, speed, angle, turning = states.unbind(-1)
    mass, sine, cosine = CART + POLE, angle.sin(), angle.cos()
    push = (FORCE * actions.clamp(-1, 1) + POLE * LENGTH * turning**2 * sine) / mass
    turn = (GRAVITY * sine - cosine * push) / (LENGTH * (4 / 3 - POLE * cosine**2 / mass))
    pull = push - POLE * LENGTH * turn * cosine / mass
    return states + SECONDS * torch.stack((speed, pull, turning, turn), -1)


@torch.no_grad()
def play(policy: GaussianPolicy) -> Episodes:
    """Episodes from near upright, each until the pole falls, the cart leaves or time is over."""
    states, up = [0.1 * torch.rand(EPISODES, 4) - 0.05], torch.ones(EPISODES, dtype=torch.bool)
    actions, logprobs, mask = [], [], []
    for _ in range(STEPS):
        distribution = policy.at(states[-1])
        actions.append(distribution.sample())
        logprobs.append(distribution.log_prob(actions[-1]))
        mask.append(up)
        states.append(torch.where(up[:, None], step(states[-1], actions[-1]), states[-1]))
        up = up & (states[-1][:, 0].abs() < EDGE) & (states[-1][:, 2].abs() < FALLEN)
    return Episodes(torch.stack(states, 1), *(torch.stack(parts, 1) for parts in (actions, logprobs, mask)))


def train(iterations: int, *, seed: int = 0) -> Iterator[float]:
    """Mean length of each iteration's episodes, before the policy learns from them."""
    torch.manual_seed(seed)
    policy, critic = GaussianPolicy(), network()
    optimizer = torch.optim.Adam([*policy.parameters(), *critic.parameters()], lr=3e-3)
    for _ in range(iterations):
        states, actions, old_logprobs, mask = play(policy)
        yield float(mask.sum(1).float().mean())
        with torch.no_grad():
            values = critic(states)[..., 0]
            upright = (states[:, -1, 0].abs() < EDGE) & (states[:, -1, 2].abs() < FALLEN)
            afterwards = torch.where(upright, values[:, -1], 0.0)
        values = values[:, :-1]
        found = gae(mask.float(), values, mask, gamma=0.98, gae_lambda=0.95, bootstrap_values=afterwards)
        advantages = whiten(found.advantages, mask)
        for rows in (part for _ in range(4) for part in torch.randperm(EPISODES).split(EPISODES // 4)):
            logprobs, now = policy.at(states[rows, :-1]).log_prob(actions[rows]), critic(states[rows, :-1])[..., 0]
            loss = policy_loss(
                logprobs, old_logprobs[rows], advantages[rows], mask[rows], clip_low=0.2, clip_high=0.2
            ) + value_loss(now, values[rows], found.returns[rows], mask[rows], clip=None)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_([*policy.parameters(), *critic.parameters()], 1.0)
            optimizer.step()


if __name__ == "__main__":
    torch.set_num_threads(1)  # more would wait for each other: the networks are tiny
    for number, length in enumerate(train(40, seed=int(sys.argv[1]) if len(sys.argv) > 1 else 0)):
        print(f"iteration {number:2}: {length:5.1f} of {STEPS} steps {'#' * round(length / STEPS * 50)}")
