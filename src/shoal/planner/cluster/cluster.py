"""Frozen values for devices, hosts, racks and links."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from shoal.errors import InputError
from shoal.planner.cluster.units import bandwidth_text, latency_text

MAX_HOSTS, MAX_DEVICES = 1 << 16, 1 << 20  # of a cluster: each host is a value in memory


@dataclass(frozen=True, kw_only=True)
class Device:
    """A processor that computes: an accelerator, or one core of a CPU."""

    name: str
    peak: Mapping[str, float]  # FLOP/s of dense matrix products by dtype: fp32, tf32, bf16 (fp16 is the same), fp8
    memory: int  # bytes
    memory_bandwidth: float  # bytes a second
    price: float | None = None  # of an hour
    currency: str = "USD"  # of the price
    # The share of it that is reached; `shoal cluster probe` measures these.
    efficiency: float = 0.8  # of the peak, by the largest matrix products
    half_flops: float = 5e9  # FLOPs of a product that reaches half of that
    stream: float = 0.8  # of the memory bandwidth, by operators that only read and write
    overhead: float = 5e-6  # seconds of the host for one operator
    reserved: int = 0  # bytes that a worker cannot use: context, libraries
    # Of one core of a CPU:
    crowded: float = 1.0  # how many times as long an operator takes while all cores of the host compute
    rates: Mapping[str, float] = field(default_factory=dict)  # by operator, where the general formula does not hold:
    # FLOP/s of operators that are counted in FLOPs, bytes a second of the rest

    def __hash__(self) -> int:  # a mapping has no hash
        return hash((self.name, self.memory, self.memory_bandwidth, tuple(sorted(self.peak.items()))))

    def peak_of(self, dtype: str) -> float:
        """FLOP/s in this dtype, or in the next wider dtype that the device supports."""
        wider = {"fp16": ("bf16", "fp32"), "bf16": ("bf16", "fp32"), "tf32": ("tf32", "fp32"),
                 "fp8": ("fp8", "bf16", "fp32")}.get(dtype, (dtype,))  # fmt: skip
        found = next((self.peak[each] for each in wider if each in self.peak), None)
        if found is None:
            raise InputError(
                f"device {self.name} has a peak for {', '.join(self.peak)} but none for {dtype}",
                fix=f'[devices.{self.name}] peak = {{ {dtype} = "… TFLOP/s" }}',
            )
        return found


@dataclass(frozen=True, kw_only=True)
class HostInterconnect:
    """The links between the devices of a host."""

    link: "ClusterLink"  # of one device, one direction
    kind: str = "nvlink"  # nvlink, pcie, memory or xgmi: for display and default latency
    shared: bool = False  # True: the devices (of a socket) share one such link, False: each has its own
    sockets: int = 1  # the devices are spread evenly over these
    between: "ClusterLink | None" = None  # between sockets, for all devices together


@dataclass(frozen=True, kw_only=True)
class ClusterLink:
    """One direction of a full-duplex link; the other direction is equal.

    The latency is end to end, for a message that crosses no higher link than this one.
    """

    bytes_per_second: float
    latency_seconds: float | None = None
    efficiency: float = 1.0  # what large messages (256 MB) reach of the bandwidth

    def seconds(self, size: float) -> float:
        """The least time for a message of `size` bytes: α + l/β."""
        return (self.latency_seconds or 0.0) + size / self.bytes_per_second

    def __str__(self) -> str:
        text = bandwidth_text(self.bytes_per_second)
        return text if self.latency_seconds is None else f"{text}, {latency_text(self.latency_seconds)}"


@dataclass(frozen=True, kw_only=True)
class ClusterHost:
    name: str
    rack: str
    workers: int
    link: ClusterLink  # all cards together
    device: Device | None = None  # the kind of its devices; None: unknown, which is enough for a lab
    devices: int = 1
    interconnect: HostInterconnect | None = None  # between the devices; None: unknown, or one device
    cards: int = 1  # equal network cards that make up the link: one device alone uses one (or its share of more)


@dataclass(frozen=True, kw_only=True)
class Rack:
    name: str
    hosts: tuple[ClusterHost, ...]
    uplink: ClusterLink

    @property
    def oversubscription(self) -> float:
        return sum(host.link.bytes_per_second for host in self.hosts) / self.uplink.bytes_per_second


@dataclass(frozen=True, kw_only=True)
class Cluster:
    racks: tuple[Rack, ...]

    def __post_init__(self) -> None:
        if not self.hosts:
            raise InputError("the cluster has no host", fix='[[racks]] with hosts = 2, or hosts = ["a", "b"]')
        for kind, names in (("racks", [r.name for r in self.racks]), ("hosts", [h.name for h in self.hosts])):
            name, times = Counter(names).most_common(1)[0]
            if times > 1:
                raise InputError(f"two {kind} are named {name}", fix="a different name for each")

    @property
    def hosts(self) -> tuple[ClusterHost, ...]:
        return tuple(host for rack in self.racks for host in rack.hosts)

    def map_hosts(self, change: Callable[[ClusterHost], ClusterHost]) -> "Cluster":
        return Cluster(racks=tuple(replace(rack, hosts=tuple(map(change, rack.hosts))) for rack in self.racks))

    def with_workers(self, each: int) -> "Cluster":
        """The same cluster with `each` workers on every host; an unknown device counts as one worker."""
        return self.map_hosts(lambda host: replace(host, workers=each, devices=host.devices if host.device else each))

    @property
    def workers(self) -> int:
        return sum(host.workers for host in self.hosts)

    @property
    def devices(self) -> int:
        return sum(host.devices for host in self.hosts)
