"""For whoever trains policies: PPO's update over one large batch of steps, with advantages normalised over all of it.

What koila gives here: the update. Means and standard deviations over the whole batch (advantages, entropy) are exact in
chunks, where micro-batches by hand would normalise each part by itself. What it does not give: rollouts. They go
through the policy one step at a time, without gradients, and read every action; leave them eager, as here. Run it with
`python examples/reinforcement.py`.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributions import Categorical

import koila

BUDGET = "100KiB"
NUM_STEPS = 40


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 32), nn.Tanh())
        self.actions, self.value = nn.Linear(32, 2), nn.Linear(32, 1)

    def forward(self, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(seen)
        return self.actions(hidden), self.value(hidden).squeeze(-1)


def rollout(policy: Policy) -> tuple[torch.Tensor, ...]:
    """Balance a point: push it left or right; the reward is to stay near the middle."""
    seen, actions, chances, rewards = [], [], [], []
    state = torch.randn(4, dtype=torch.float64)
    for _ in range(NUM_STEPS):
        with torch.no_grad():
            chosen = Categorical(logits=policy(state)[0])
            action = chosen.sample()
        seen.append(state)
        actions.append(action)
        chances.append(chosen.log_prob(action))
        state = state + torch.stack([state[1], 2.0 * action.double() - 1, state[3], -state[2]]) * 0.1
        rewards.append(-state.abs().sum())
    returns = torch.stack(rewards).flip(0).cumsum(0).flip(0) / NUM_STEPS
    return torch.stack(seen), torch.stack(actions), torch.stack(chances), returns


def update(policy: Policy, seen: torch.Tensor, actions: torch.Tensor, chances: torch.Tensor,
           returns: torch.Tensor) -> torch.Tensor:  # fmt: skip
    logits, values = policy(seen)
    found = Categorical(logits=logits, validate_args=False)
    advantages = (returns - values).detach()
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    ratio = (found.log_prob(actions) - chances).exp()
    gain = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
    return -gain + 0.5 * (returns - values).square().mean() - 0.01 * found.entropy().mean()


def train(use_koila: bool = True, budget: object = BUDGET) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    policy = Policy().double()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    for _ in range(2):
        batch = rollout(policy)
        for _ in range(2):
            seen, actions, chances, returns = koila.lazy(*batch, budget=budget) if use_koila else batch
            loss = update(policy, seen, actions, chances, returns)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return {**policy.state_dict(), "loss": loss.detach()}


def main() -> None:
    plain, ours = train(use_koila=False), train()
    print(max(koila.reports(), key=lambda report: report.projected_bytes or 0))
    print("largest difference:", max((plain[name] - ours[name]).abs().max().item() for name in plain))


if __name__ == "__main__":
    main()
