"""What a seed stands for: how large the run is, how bad the world, and which faults come when."""

from dataclasses import dataclass
from random import Random

LANES = 4  # slices of a step; as many samples
MAX_WORKERS = 6  # for workers, where the model is cut: two or three replicas

# Seconds, on the virtual clock.
BEAT_SECONDS, LEASE_SECONDS, PATIENCE_SECONDS = 0.25, 0.8, 1.6
FORMING_SECONDS, STORE_SECONDS = (
    1.2,
    0.5,
)  # how long somebody waits for the others to form a group, or for the store to answer
COLLECTIVE_SECONDS = 1000.0  # nobody may depend on giving up a collective because it takes long
BOUND_SECONDS = 60.0  # from the end of all faults to the end of the run

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
AIMED_FAULTS = {"crash": 6, "pause": 6, "cut": 4, "storeless": 1, "store": 1}  # in the middle of something
MOMENTS = (
    *("propose", "post", "hello", "take", "state", "begin", "begun"),  # membership
    *("offer", "vote", "vote", "met", "evaluation", "save", "boundary", "joining"),  # a step
)


@dataclass(frozen=True, kw_only=True)
class SimScenario:
    workers: int
    parts: int  # that the model is cut into; a worker has one of them
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


def draw_scenario(random: Random, parts: int = 1) -> SimScenario:
    def often(share: float, *values: float) -> float:
        return random.choice(values) if random.random() < share else 0.0

    crowded = random.random() < 0.3  # newcomers in a world whose faults hit the step they come in with
    heals = random.uniform(0.8, 4.0)
    kinds = random.choices(list(FAULTS), list(FAULTS.values()), k=random.choice((0, 1, 1, 2, 3, 5)))
    workers = random.choice((2, 3)) if crowded else random.choice((1, 2, 2, 3, 3, 4))
    return SimScenario(
        workers=workers if parts == 1 else parts * min((workers + 1) // 2, MAX_WORKERS // parts),
        parts=parts,
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
