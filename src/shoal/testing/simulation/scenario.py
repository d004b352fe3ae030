"""What a seed decides: the size of the run, the rates of faults, and when they come."""

from dataclasses import dataclass
from random import Random

LANES = 4  # of a step; as many samples
MAX_WORKERS = 6  # where the model is cut: two or three replicas

# Seconds, on the virtual clock.
BEAT_SECONDS, LEASE_SECONDS, PATIENCE_SECONDS = 0.25, 0.8, 1.6
FORMING_SECONDS, STORE_SECONDS = 1.2, 0.5  # waits of a worker for the others to form a group, and for the store
COLLECTIVE_SECONDS = 1000.0  # correctness must not depend on a collective's timeout
BOUND_SECONDS = 60.0  # from the end of all faults to the end of the run

FAULTS = {
    "crash": 6,
    "pause": 5,
    "apart": 3,  # two workers cannot reach each other
    "storeless": 3,  # a worker cannot reach the store
    "cutoff": 1,  # no member can reach the store
    "store": 2,  # it stops for a while
    "driver": 2,
    "leave": 3,
    "everything": 1,  # every process at once, store and driver too
}
AIMED_FAULTS = {"crash": 6, "pause": 6, "cut": 4, "storeless": 1, "store": 1}  # at a moment of an operation
MOMENTS = (
    *("propose", "post", "hello", "take", "state", "begin", "begun"),  # membership
    *("offer", "vote", "vote", "committed", "evaluation", "save", "boundary", "joining"),  # a step
)


@dataclass(frozen=True, kw_only=True)
class SimScenario:
    workers: int
    shards: int  # model shards; a worker holds one of them
    passes: int  # backward passes of a batch: each is voted for, and changes the weights
    hosts: int
    last: int  # steps of the run
    saves: int  # steps between checkpoints; 0: none
    evaluates: int
    resumed: int  # step of the checkpoint that the run begins with; 0: none
    first_view: bool  # the driver writes it; otherwise the workers find each other
    replaces: bool
    removes: bool  # the driver removes lost workers from the view; otherwise the workers do
    kills: bool  # survivors end an evicted process of their host
    judges: bool  # a closed connection counts as a death
    loses: float  # of messages between workers: the connection breaks
    store_loses: float  # of requests to the store, and of its answers
    doubles: float
    delays: float  # of messages: slow ones
    aims: float  # faults at a moment of an operation,
    focus: str  # most of them at this moment,
    focuses: float  # with this share
    joins: tuple[float, ...]  # when more workers start
    corrupts: float  # of checkpoints and states: those that do not verify
    heals: float  # when all faults end
    faults: tuple[tuple[float, str], ...]


def draw_scenario(random: Random, shards: int = 1, passes: int = 1) -> SimScenario:
    def often(share: float, *values: float) -> float:
        return random.choice(values) if random.random() < share else 0.0

    crowded = random.random() < 0.3  # newcomers join while faults hit the step of their arrival
    heals = random.uniform(0.8, 4.0)
    kinds = random.choices(list(FAULTS), list(FAULTS.values()), k=random.choice((0, 1, 1, 2, 3, 5)))
    workers = random.choice((2, 3)) if crowded else random.choice((1, 2, 2, 3, 3, 4))
    return SimScenario(
        workers=workers if shards == 1 else shards * min((workers + 1) // 2, MAX_WORKERS // shards),
        shards=shards,
        passes=passes,
        hosts=random.choice((1, 2, 4)),
        last=random.randint(4, 8),
        saves=random.choice((0, 2, 2, 3)),
        evaluates=random.choice((0, 2, 3)),
        resumed=random.choice((0, 0, 0, 2)),
        first_view=random.random() < 0.8,
        replaces=random.random() < 0.7,
        removes=random.random() < 0.4,
        kills=random.random() < 0.5,
        judges=random.random() < 0.4,
        loses=often(0.4, 0.002, 0.01, 0.04),
        store_loses=often(0.4, 0.02, 0.1, 0.25),
        doubles=often(0.5, 0.1, 0.4),
        delays=often(0.6, 0.01, 0.05, 0.15),
        aims=often(0.5, 0.005, 0.02),
        focus=random.choice(("joining", "boundary", "state", "take", "evaluation") if crowded else MOMENTS),
        focuses=0.3 if crowded else often(0.8, 0.03, 0.1, 0.3),
        corrupts=often(0.3, 0.1, 0.4),
        joins=tuple(
            random.uniform(0.3, 1.0 if crowded else heals) for _ in range(2 if crowded else random.choice((0, 1)))
        ),
        heals=heals,
        faults=() if crowded else tuple(sorted((random.uniform(0.0, heals), kind) for kind in kinds)),
    )
