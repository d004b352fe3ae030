"""Time to accuracy: how many updates a target takes, and how long they take. A law with stated assumptions.

    updates = S_min · (1 + c·τ + B_noise / B)

S_min      updates that no batch, however large, can avoid; B_noise: the batch that needs twice as many. McCandlish et
           al. 2018 ("An empirical model of large-batch training"): steps = S_min · (1 + B_noise/B)
B          samples in one update
τ, c       mean staleness of a gradient in updates, and its price. Delay multiplies only the part that noise does not
           cover (Stich and Karimireddy 2020; Arjevani, Shamir and Srebro 2020), so it is a separate summand. With
           c = 1, async needs as many samples as sync with a batch of all workers: it only saves waiting
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.errors import InputError
from shoal.planner.simulate.servers import SimulatedServerRun, SimulatedServers

ASSUMPTIONS = (
    "updates needed = least updates × (1 + staleness penalty × mean staleness + noise batch / batch of an update)",
    "least updates and noise batch belong to the job and are measured or guessed; the learning rate is tuned for each",
    "samples of workers that are late for a quorum are as good as the others: their absence costs nothing",
)


@dataclass(frozen=True, kw_only=True)
class ConvergenceLaw:
    min_updates: float = 1.0  # S_min; 1: times are relative
    noise_batch: float = 1.0  # B_noise, samples
    penalty: float = 1.0  # c

    def __post_init__(self) -> None:
        if not (self.min_updates > 0 and self.noise_batch >= 0 and self.penalty >= 0):
            values = f"least updates {self.min_updates:g}, noise {self.noise_batch:g}, penalty {self.penalty:g}"
            raise InputError(f"{values}: the first must be above 0, none may be negative")

    def updates(self, batch: float, staleness: float = 0.0) -> float:
        return self.min_updates * (1 + self.penalty * staleness + self.noise_batch / batch)

    def samples(self, batch: float, staleness: float = 0.0) -> float:
        return batch * self.updates(batch, staleness)


@dataclass(frozen=True, kw_only=True)
class TimeToAccuracy:
    """When a mode reaches the target."""

    run: SimulatedServerRun
    batch: float  # of an update
    updates: float
    seconds: float


def time_to_accuracy(
    law: ConvergenceLaw, setup: SimulatedServers, run: SimulatedServerRun, batch: float
) -> TimeToAccuracy:
    """`batch`: samples of all workers together."""
    own = batch / setup.workers * run.gradients / run.updates
    updates = law.updates(own, run.mean_staleness)
    return TimeToAccuracy(run=run, batch=own, updates=updates, seconds=updates / run.updates_per_second)


def time_to_accuracy_table(
    law: ConvergenceLaw, setup: SimulatedServers, runs: Sequence[SimulatedServerRun], batch: float
) -> list[TimeToAccuracy]:
    return [time_to_accuracy(law, setup, each, batch) for each in runs]
