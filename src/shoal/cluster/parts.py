"""What to train on: devices in hosts in racks, and the links between them. Frozen values."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shoal.cluster.units import bandwidth_text, latency_text
from shoal.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Device:
    """What computes: an accelerator, or a core of a processor."""

    name: str
    peak: Mapping[str, float]  # FLOP/s of dense matrix products by dtype: fp32, tf32, bf16 (fp16 is the same), fp8
    memory: int  # bytes
    memory_bandwidth: float  # bytes a second
    price: float | None = None  # of an hour
    # What of it is reached; a probe measures these.
    efficiency: float = 0.8  # of the peak, by the largest matrix products
    half_flops: float = 5e9  # FLOPs of a product that reaches half of that
    stream: float = 0.8  # of the memory bandwidth, by operators that only read and write
    overhead: float = 5e-6  # seconds of the host for one operator
    reserved: int = 0  # bytes that are never ours: context, libraries


@dataclass(frozen=True, kw_only=True)
class Inside:
    """What connects the devices of a host."""

    link: "Link"  # of one device, one direction
    kind: str = "nvlink"  # nvlink, pcie, memory: a word for the picture
    shared: bool = False  # True: the devices share one such link, False: each has its own
    sockets: int = 1  # devices are spread over so many
    between: "Link | None" = None  # sockets, all devices together


@dataclass(frozen=True, kw_only=True)
class Link:
    """One direction of a full-duplex link; the other is its equal."""

    bytes_per_second: float
    latency_seconds: float | None = None

    def __str__(self) -> str:
        text = bandwidth_text(self.bytes_per_second)
        return text if self.latency_seconds is None else f"{text}, {latency_text(self.latency_seconds)}"


@dataclass(frozen=True, kw_only=True)
class Host:
    name: str
    rack: str
    workers: int
    link: Link
    device: Device | None = None  # what kind its devices are; None: not said, which is enough for a lab
    devices: int = 1
    inside: Inside | None = None  # what connects them; None: not said, or one device


@dataclass(frozen=True, kw_only=True)
class Rack:
    name: str
    hosts: tuple[Host, ...]
    uplink: Link

    @property
    def oversubscription(self) -> float:
        return sum(host.link.bytes_per_second for host in self.hosts) / self.uplink.bytes_per_second


@dataclass(frozen=True, kw_only=True)
class Cluster:
    racks: tuple[Rack, ...]

    def __post_init__(self) -> None:
        if not self.hosts:
            raise InputError("a cluster without a host", fix='[[racks]] with hosts = 2, or hosts = ["a", "b"]')
        for kind, names in (("racks", [r.name for r in self.racks]), ("hosts", [h.name for h in self.hosts])):
            twice = [name for name in names if names.count(name) > 1]
            if twice:
                raise InputError(f"two {kind} are called {twice[0]}", fix="a name of its own for each")

    @property
    def hosts(self) -> tuple[Host, ...]:
        return tuple(host for rack in self.racks for host in rack.hosts)

    def with_workers(self, each: int) -> "Cluster":
        """The same with this many workers on every host."""
        racks = (replace(rack, hosts=tuple(replace(host, workers=each) for host in rack.hosts)) for rack in self.racks)
        return Cluster(racks=tuple(racks))

    @property
    def workers(self) -> int:
        return sum(host.workers for host in self.hosts)
