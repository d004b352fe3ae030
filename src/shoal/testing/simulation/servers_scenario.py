"""What a seed of the servers' simulation decides: mode, size, rates of faults and when they come."""

from dataclasses import dataclass, replace
from random import Random


@dataclass(frozen=True, kw_only=True)
class SimServersScenario:
    mode: str  # "push", or a mode of --sync
    workers: int
    shards: int
    steps: int  # in all; in mode "push" of each worker
    window: int  # pushes in flight
    drops: float  # of requests, and of answers
    doubles: float  # of requests
    delays: float  # of frames: slow ones
    breaks: float  # of connections, by frame
    keeps: float  # seconds between snapshots
    torn: float  # of the newest snapshots: those that do not verify
    crashes: tuple[tuple[float, int], ...] = ()  # when, which server
    deaths: tuple[tuple[float, int], ...] = ()  # when, which worker
    heals: float = 2.0  # when all faults end
    rows: bool = False  # with a sparse table
    clips: bool = False  # in sync and quorum mode; in quorum mode nothing exceeds the norm
    buffers: bool = False  # in sync and local mode
    eager: bool = False  # sync, local: the barrier request does not wait for acknowledged contributions


MODES = ("push", "push", "push", "async", "stale:0", "stale:2", "groups:2", "sync", "sync", "quorum:0.6")


def draw_servers_scenario(random: Random) -> SimServersScenario:
    def often(share: float, *values: float) -> float:
        return random.choice(values) if random.random() < share else 0.0

    mode = random.choice(MODES)
    workers, shards = random.choice((1, 2, 3, 4)), random.choice((1, 2, 2, 3))
    workers = max(2, workers) if mode == "groups:2" else workers
    heals = random.uniform(0.5, 2.5)
    some = random.choice((0, 0, 1, 1, 2, 3))
    deaths = random.choice((0, 0, 1, 2))
    return SimServersScenario(
        mode=mode,
        workers=workers,
        shards=shards,
        steps=random.randint(3, 10),
        window=random.choice((1, 1, 2, 4)),
        drops=often(0.6, 0.05, 0.2),
        doubles=often(0.6, 0.05, 0.2),
        delays=often(0.5, 0.05, 0.2),
        breaks=often(0.4, 0.01, 0.05),
        keeps=random.choice((0.1, 0.3, 1.0)),
        torn=often(0.3, 0.3),
        crashes=tuple(sorted((random.uniform(0.05, heals), random.randrange(shards)) for _ in range(some))),
        deaths=tuple(sorted((random.uniform(0.05, heals), random.randrange(workers)) for _ in range(deaths))),
        heals=heals,
    )


def add_features(random: Random, plan: SimServersScenario) -> SimServersScenario:
    """Adds tables, clipping and buffers from a random stream of its own, so that the scenario of a seed stays."""
    mode = plan.mode
    if random.random() < 0.15:
        mode = random.choice(("local:2", "local:2,outer=nesterov"))
    exact, local = mode == "sync", mode.startswith("local")
    return replace(
        plan,
        mode=mode,
        rows=not local and random.random() < 0.5,
        clips=(exact or mode.startswith("quorum")) and random.random() < 0.4,
        buffers=(exact or local) and random.random() < 0.4,
        eager=(exact or local) and random.random() < 0.5,
    )


def drop_unsupported(plan: SimServersScenario) -> SimServersScenario:
    """Drops features that the mode does not support."""
    mode = plan.mode.partition(":")[0]
    lockstep = mode in ("sync", "local")
    return replace(
        plan,
        rows=plan.rows and mode != "local",
        clips=plan.clips and mode in ("sync", "quorum"),
        buffers=plan.buffers and lockstep,
        eager=plan.eager and lockstep,
    )
