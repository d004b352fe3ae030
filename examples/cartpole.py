"""Actor-critic on CartPole, with workers that wait for nobody.

    python examples/cartpole.py                                    starts servers and workers by itself
    shoal run examples/cartpole.py --workers 2 --servers 1         the same, started by shoal

No job and no data: each worker plays with the weights that it pulled last, pushes its gradient, and gets new weights
with the answer; meanwhile the others have pushed theirs. The optimizer runs on the servers. So do the books: a counter
is a parameter with a learning rate of 1, and what is pushed is subtracted from it.

It ends when the last 50 episodes of a worker last 250 steps on average (random play: 22), or after --updates.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import gymnasium
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.paramserver.client import ParameterClient
from shoal.paramserver.local_servers import LocalServers, connect
from shoal.paramserver.messages import SparseSpec
from shoal.report.chart import Chart, save_charts, text

GAMES, LENGTH = 8, 32  # played side by side by each worker, and for how many steps before a gradient
DISCOUNT, TRACE, ENTROPY = 0.99, 0.95, 0.01
LEARNING_RATE = 0.002
RANDOM_PLAY = 22
LAST = 50  # episodes that the target is about
PATIENCE_SECONDS = 10.0  # for workers that have not left when worker 0 has


@dataclass(frozen=True, kw_only=True)
class Episode:
    update: int  # of all workers together, when it ended
    worker: int
    steps: float  # how long the pole stood; CartPole's return


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
        self.critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))

    def value(self, seen: Tensor) -> Tensor:
        found: Tensor = self.critic(seen).squeeze(-1)
        return found


class Player:
    """Some games at once; each goes on where it stood when a gradient was computed."""

    def __init__(self, seed: int) -> None:
        self.games = [gymnasium.make("CartPole-v1") for _ in range(GAMES)]
        starts = [game.reset(seed=1000 * seed + number)[0] for number, game in enumerate(self.games)]
        self.seen = torch.from_numpy(np.stack(starts))
        self.lengths = [0.0] * GAMES
        self.generator = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def play(self, model: ActorCritic) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], list[float]]:
        """What was seen and done, each action's advantage and each state's value; and the episodes that ended."""
        seen = torch.empty(LENGTH + 1, GAMES, 4)
        actions = torch.empty(LENGTH, GAMES, dtype=torch.int64)
        rewards = torch.ones(LENGTH, GAMES)
        goes_on = torch.ones(LENGTH, GAMES)
        ended = []
        for step in range(LENGTH):
            seen[step] = self.seen
            chances = F.softmax(model.actor(self.seen), dim=-1)
            actions[step] = torch.multinomial(chances, 1, generator=self.generator).squeeze(1)
            for number, game in enumerate(self.games):
                state, reward, fell, cut, _ = game.step(int(actions[step, number]))
                self.lengths[number] += float(reward)
                if fell or cut:
                    goes_on[step, number] = 0
                    if not fell:  # 500 steps are the end of the game, not of the pole: the rest is what the critic says
                        rewards[step, number] += DISCOUNT * model.value(torch.from_numpy(state))
                    ended.append(self.lengths[number])
                    self.lengths[number] = 0.0
                    state, _ = game.reset()
                self.seen[number] = torch.from_numpy(state)
        seen[LENGTH] = self.seen
        values = model.value(seen)
        advantages = torch.empty(LENGTH, GAMES)
        later = torch.zeros(GAMES)
        for step in reversed(range(LENGTH)):
            surprise = rewards[step] + DISCOUNT * goes_on[step] * values[step + 1] - values[step]
            later = advantages[step] = surprise + DISCOUNT * TRACE * goes_on[step] * later
        return (seen[:-1], actions, advantages, advantages + values[:-1]), ended


def loss(model: ActorCritic, seen: Tensor, actions: Tensor, advantages: Tensor, returns: Tensor) -> Tensor:
    logarithms = F.log_softmax(model.actor(seen), dim=-1)
    chosen = logarithms.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
    policy = -(chosen * advantages / (advantages.std() + 1)).mean()
    entropy = -(logarithms.exp() * logarithms).sum(-1).mean()
    return policy + 0.5 * F.smooth_l1_loss(model.value(seen), returns) - ENTROPY * entropy


# -- a worker ---------------------------------------------------------------------------------------------------------


class Books:
    """What all workers know: how far they are, and every episode that ended. A row of the table is an episode."""

    def __init__(self, client: ParameterClient, workers: int) -> None:
        self.workers = workers
        self.known = {"updates": torch.zeros(1), "stop": torch.zeros(1), "episodes": torch.zeros(workers)}
        self.known["left"] = torch.zeros(1)
        self.counters = client.dense("counters", self.known, optimizer="sgd", lr=1.0)
        spec = SparseSpec(rows=1 << 40, dim=2, scale=0.0, optimizer="sgd", settings={"lr": 1.0})
        self.table = client.sparse("episodes", spec)
        self.counters.pull(self.known).wait()

    def __getitem__(self, name: str) -> int:
        return int(self.known[name].sum())

    def add(self, **numbers: Tensor | int) -> None:
        """To the counters; then this worker knows all of them."""
        pushed = {name: -torch.as_tensor(number).float().reshape(-1) for name, number in numbers.items()}
        self.counters.push(pushed, pull_into=self.known).wait()

    def write(self, worker: int, ended: list[float]) -> None:
        if not ended:
            return
        first = int(self.known["episodes"][worker])
        rows = torch.arange(first, first + len(ended)) * self.workers + worker
        self.table.push(rows, torch.tensor([[-steps, -float(self["updates"])] for steps in ended])).wait()
        self.add(episodes=F.one_hot(torch.tensor(worker), self.workers) * len(ended))

    def read(self) -> list[Episode]:
        """All of them, by the update after which they ended."""
        self.counters.pull(self.known).wait()
        found = []
        for worker, number in enumerate(self.known["episodes"].int().tolist()):
            rows = self.table.pull(torch.arange(number) * self.workers + worker).wait()
            found += [Episode(update=int(update), worker=worker, steps=steps) for steps, update in rows.tolist()]
        return sorted(found, key=lambda episode: (episode.update, episode.worker))


def work(client: ParameterClient, worker: int, workers: int, given: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(given.seed)  # who comes first fills the table, and all would fill it alike
    model = ActorCritic()
    parameters = dict(model.named_parameters())
    weights = client.dense("weights", parameters, optimizer="adam", lr=LEARNING_RATE)
    weights.pull(parameters).wait()
    books = Books(client, workers)
    player = Player(seed=given.seed * workers + worker)
    recent: list[float] = []
    while books["updates"] < given.updates and not books["stop"]:
        played, ended = player.play(model)
        model.zero_grad()
        loss(model, *played).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        pushed = weights.push({name: each.grad for name, each in parameters.items()}, pull_into=parameters)
        books.add(updates=1)  # on its way together with the gradient
        pushed.wait()
        books.write(worker, ended)
        recent = [*recent, *ended][-LAST:]
        if len(recent) == LAST and sum(recent) >= LAST * given.target:
            books.add(stop=1)
        if worker == 0 and books["updates"] % 100 < workers and recent and not given.json:
            mean = sum(recent) / len(recent)
            print(f"{books['updates']:5} updates  {books['episodes']:5} episodes  last ones {mean:5.1f}", flush=True)
    books.add(left=1)
    if worker == 0:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while books["left"] < workers and time.monotonic() < deadline:
            time.sleep(0.02)
            books.counters.pull(books.known).wait()
        show(books.read(), books["updates"], given)


# -- what came of it --------------------------------------------------------------------------------------------------


def curve(episodes: list[Episode], points: int = 20) -> Chart:
    size = -(-len(episodes) // points)
    bins = [episodes[start : start + size] for start in range(0, len(episodes), size)]
    means = [sum(episode.steps for episode in each) / len(each) for each in bins]
    ends = [min(len(episodes), size * (number + 1)) for number in range(len(bins))]
    return Chart(
        title="CartPole, asynchronous actor-critic",
        x_label="episodes",
        y_label="steps that the pole stood",
        x=ends,
        lines={"mean": means, "random play": [RANDOM_PLAY] * len(bins)},
    )


def show(episodes: list[Episode], updates: int, given: argparse.Namespace) -> None:
    if not episodes:
        sys.exit(f"no episode ended in {updates} updates; more --updates are needed")
    last = episodes[-LAST:]
    mean = sum(episode.steps for episode in last) / len(last)
    if given.json:
        summary = {"updates": updates, "last": mean, "episodes": [asdict(episode) for episode in episodes]}
        print(json.dumps(summary), flush=True)
    else:
        print(text(curve(episodes)))
        print(f"{len(episodes)} episodes, {updates} updates; the last {len(last)} stood {mean:.0f} steps on average")
    if given.picture is not None:
        save_charts([curve(episodes)], given.picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=1000, help="gradients of all workers together, at the most")
    parser.add_argument("--target", type=float, default=250.0, help=f"mean of {LAST} episodes at which it ends")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="every episode, as JSON")
    parser.add_argument("--picture", type=Path, help="the curve as .svg or .png")
    parser.add_argument("--workers", type=int, default=2, help="without shoal run")
    parser.add_argument("--servers", type=int, default=1, help="without shoal run")
    given = parser.parse_args()
    if os.environ.get("SHOAL_SERVERS"):
        with connect() as client:
            work(client, client.client_id.worker, int(os.environ.get("WORLD_SIZE", "1")), given)
        return
    with LocalServers(given.servers) as servers:
        fork = multiprocessing.get_context("fork")
        processes = [
            fork.Process(target=one_of, args=(servers.addresses, worker, given), daemon=True)
            for worker in range(given.workers)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            sys.exit(f"workers ended with codes {[process.exitcode for process in processes]}")


def one_of(addresses: list[str], worker: int, given: argparse.Namespace) -> None:
    with connect(addresses, worker) as client:
        work(client, worker, given.workers, given)


if __name__ == "__main__":
    main()
