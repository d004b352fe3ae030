"""Actor and critic on recorded situations of a small game: a policy and a value network, each with its own optimizer.

    shoal run examples/first_day/actor_critic.py --workers 2

The best of four levers depends on where one stands. The actor tries one, drawn by its own probabilities; the critic
learns what a place is worth, and the actor gets better at what brought more than that.
"""

import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.utils.data import DataLoader, TensorDataset

import shoal

PLACES, LEVERS = 6, 4

torch.manual_seed(0)
rewards = torch.rand(PLACES, LEVERS)
loader = DataLoader(TensorDataset(torch.randint(PLACES, (512,))), batch_size=64, shuffle=True)

actor = nn.Sequential(nn.Embedding(PLACES, 16), nn.Tanh(), nn.Linear(16, LEVERS))
critic = nn.Sequential(nn.Embedding(PLACES, 16), nn.Tanh(), nn.Linear(16, 1))
actor_opt = torch.optim.Adam(actor.parameters(), lr=0.02)
critic_opt = torch.optim.Adam(critic.parameters(), lr=0.02)
slower = torch.optim.lr_scheduler.StepLR(actor_opt, step_size=16, gamma=0.5)

run = shoal.join(
    {"actor": actor, "critic": critic}, {"actor": actor_opt, "critic": critic_opt}, loader, scheduler={"actor": slower}
)


def play(places: Tensor) -> tuple[Tensor, Tensor]:
    """Pulls a lever in each place: the logarithm of its probability, and how much more it brought than expected."""
    policy = Categorical(logits=actor(places))
    lever = policy.sample()
    advantage = rewards[places, lever] - critic(places).squeeze(1)
    return policy.log_prob(lever), advantage


def value_loss(batch: list[Tensor]) -> Tensor:
    return play(batch[0])[1].square().mean()


def policy_loss(batch: list[Tensor]) -> Tensor:
    log_prob, advantage = play(batch[0])
    return -(log_prob * advantage.detach()).mean()


for _ in run.epochs(5):
    for batch in run.batches():
        # Both passes pull the same levers (`same_noise`), and neither update is seen by the other pass.
        value = run.backward(batch, value_loss, optimizer=critic_opt)
        policy = run.backward(batch, policy_loss, optimizer=actor_opt, same_noise=True)
        run.clip(1.0)  # of the last pass: the actor's
        critic_opt.step()
        actor_opt.step()
        slower.step()
if run.leader:
    chosen = actor(torch.arange(PLACES)).argmax(1)
    best = (rewards.gather(1, chosen[:, None]).squeeze(1) / rewards.max(1).values).mean()
    print(f"value loss {value!r} policy loss {policy!r}; {best:.0%} of what the best levers bring")
