"""What a seed stands for: how large the run is, how bad the world, and which faults come when."""

from dataclasses import dataclass
from random import Random

LANES = 4  # parts of a step; as many samples

# Seconds, on the virtual clock.
BEAT, LEASE, PATIENCE = 0.25, 0.8, 1.6
COLLECTIVE, FORMING, STORE = 2.5, 1.2, 0.5  # how long somebody waits for the others, or for the store's answer
BOUND = 60.0  # from the end of all faults to the end of the run

FAULTS = {
    "crash": 6,
    "pause": 5,
    "apart": 3,  # two workers cannot talk
    "storeless": 3,  # a worker cannot talk to the store
    "cutoff": 1,  # no member can talk to the store
    "store": 2,  # it is away for a while and comes back
    "driver": 2,
    "leave": 3,
    "everything": 1,  # every process at once, store and driver too
}
AIMED = {"crash": 6, "pause": 6, "cut": 4, "storeless": 1, "store": 1}  # in the middle of something
MOMENTS = (
    *("propose", "post", "hello", "take", "state", "begin", "begun"),  # membership
    *("offer", "vote", "vote", "met", "evaluation", "save", "boundary", "joining"),  # a step
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    workers: int
    hosts: int
    last: int  # steps of the run
    saves: int  # a checkpoint every so many steps; 0: none
    evaluates: int
    resumed: int  # a checkpoint of an earlier run that this one begins with; 0: none
    first_view: bool  # by the driver, before anybody else; otherwise the workers find each other
    replaces: bool
    removes: bool  # the driver takes the dead out of the view; otherwise the workers do
    kills: bool  # survivors end an evicted process of their host
    judges: bool  # a closed connection counts as a death
    loses: float  # of messages between workers: the connection breaks
    store_loses: float  # of requests to the store, and of its answers
    doubles: float
    delays: float  # messages that take their time
    aims: float  # faults in the middle of something,
    focus: str  # most of them at this moment,
    focuses: float  # with this share
    joins: tuple[float, ...]  # when more workers come
    corrupts: float  # checkpoints that do not verify, states that arrive changed
    heals: float  # when all faults end
    faults: tuple[tuple[float, str], ...]


def draw(random: Random) -> Plan:
    def often(share: float, *values: float) -> float:
        return random.choice(values) if random.random() < share else 0.0

    workers = random.choice((1, 2, 2, 3, 3, 4))
    last = random.randint(4, 8)
    heals = random.uniform(0.8, 4.0)
    kinds = random.choices(list(FAULTS), list(FAULTS.values()), k=random.choice((0, 1, 1, 2, 3, 5)))
    return Plan(
        workers=workers,
        hosts=random.choice((1, 2, 4)),
        last=last,
        saves=random.choice((0, 2, 2, 3)),
        evaluates=random.choice((0, 2, 3)),
        resumed=random.choice((0, 0, 0, 2)),
        first_view=random.random() < 0.8,
        replaces=random.random() < 0.7,
        removes=random.random() < 0.4,
        kills=random.random() < 0.5,
        judges=random.random() < 0.4,
        loses=often(0.4, 0.002, 0.01, 0.04),
        store_loses=often(0.5, 0.02, 0.1, 0.25),
        doubles=often(0.5, 0.1, 0.4),
        delays=often(0.6, 0.01, 0.05, 0.15),
        aims=often(0.5, 0.005, 0.02),
        focus=random.choice(MOMENTS),
        focuses=often(0.8, 0.03, 0.1, 0.3),
        joins=tuple(random.uniform(0.3, heals) for _ in range(random.choice((0, 0, 1, 1, 2)))),
        corrupts=often(0.3, 0.1, 0.4),
        heals=heals,
        faults=tuple(sorted((random.uniform(0.0, heals), kind) for kind in kinds)),
    )
