"""What a lab is made of: its addresses, the commands that build its network, its picture. Pure.

    host r0h0   eth0 ══ r0h0 ┐                                           ┌ r1h0 ══ eth0   host r1h0
                             ├ rack0  up0 ══ down0  spine  down1 ══ up1  rack1 ┤
    host r0h1   eth0 ══ r0h1 ┘                                           └ r1h1 ══ eth0   host r1h1

Every ══ is a pair of virtual interfaces, and each end has a token bucket (`tc tbf`) for what it sends: the link's rate
in both directions. `eth0` is in its host's namespace, all the rest in one more, the fabric.
"""

from collections.abc import Sequence

from shoal.driver.launchers.namespaces import INTERFACE
from shoal.planner.cluster import Cluster, bandwidth_text

NETWORK = "10.77"  # 10.77.RACK.HOST, not reached from outside
MOST_RACKS, MOST_HOSTS = 256, 254  # in such an address: racks, and hosts of a rack
# What a link lets through at once after a pause. Above 64 KB, which links from 300 Mbit/s on have, the kernel passes on
# what TCP hands over as one; below it cuts that into frames, and a fast lab would measure the processor.
BURST_SECONDS, LEAST_BURST = 0.002, 16 << 10
QUEUE_SECONDS, LEAST_QUEUE = 0.05, 512 << 10  # what a port holds before it drops
PAYLOAD = 1448 / 1514  # of a full Ethernet frame: the rest is its header, IP's and TCP's
USUAL_LATENCY = 1e-4  # seconds per message, where the cluster file has none


def addresses(cluster: Cluster) -> dict[str, str]:
    return {
        host.name: f"{NETWORK}.{number}.{place + 1}"
        for number, rack in enumerate(cluster.racks)
        for place, host in enumerate(rack.hosts)
    }


def fabric_links(cluster: Cluster, paths: Sequence[str]) -> list[str]:
    """Lines for `ip` in the fabric: the switches, and a cable to each host's namespace (paths, in order of hosts)."""
    lines = ["link add spine type bridge", "link set spine up"]
    left = iter(paths)
    for number, rack in enumerate(cluster.racks):
        lines += [
            f"link add rack{number} type bridge",
            f"link set rack{number} up",
            f"link add up{number} type veth peer name down{number}",
            f"link set up{number} master rack{number} up",
            f"link set down{number} master spine up",
        ]
        for place in range(len(rack.hosts)):
            port = f"r{number}h{place}"
            lines.append(f"link add {port} type veth peer name {INTERFACE} netns {next(left)}")
            lines.append(f"link set {port} master rack{number} up")
    return lines


def fabric_rates(cluster: Cluster) -> list[str]:
    """Lines for `tc` in the fabric: what the switches send to each other and to hosts."""
    lines = []
    for number, rack in enumerate(cluster.racks):
        lines += [rate(f"{end}{number}", rack.uplink.bytes_per_second) for end in ("up", "down")]
        lines += [rate(f"r{number}h{place}", host.link.bytes_per_second) for place, host in enumerate(rack.hosts)]
    return lines


def rate(interface: str, bytes_per_second: float) -> str:
    burst, queue = burst_bytes(bytes_per_second), max(LEAST_QUEUE, bytes_per_second * QUEUE_SECONDS)
    speed = round(bytes_per_second * 8)
    return f"qdisc add dev {interface} root tbf rate {speed}bit burst {burst} limit {burst + round(queue)}"


def burst_bytes(bytes_per_second: float) -> int:
    return max(LEAST_BURST, round(bytes_per_second * BURST_SECONDS))


def links(cluster: Cluster) -> dict[str, tuple[float, float]]:
    """By level: seconds per message, and bytes of messages per second. Of unequal links, those of the slowest."""
    found = {"host": [host.link for host in cluster.hosts]}
    if len(cluster.racks) > 1:
        found["rack"] = [rack.uplink for rack in cluster.racks]
    return {
        level: (
            max(USUAL_LATENCY if link.latency_seconds is None else link.latency_seconds for link in those),
            round(PAYLOAD * min(link.bytes_per_second for link in those)),
        )
        for level, those in found.items()
    }


def picture(cluster: Cluster) -> str:
    """Racks, hosts, addresses and links, for the user."""
    known = addresses(cluster)
    width = max(len(host.name) for host in cluster.hosts)
    lines = []
    for rack in cluster.racks:
        over = f"{rack.oversubscription:.3g}:1 oversubscribed" if len(cluster.racks) > 1 else "not in use"
        lines.append(f"rack {rack.name}   uplink {bandwidth_text(rack.uplink.bytes_per_second)}, {over}")
        for host in rack.hosts:
            workers = f"{host.workers} worker{'s' if host.workers > 1 else ''}"
            link = bandwidth_text(host.link.bytes_per_second)
            lines.append(f"  host {host.name:{width}}   {known[host.name]:13} link {link}   {workers}")
    return "\n".join(lines + notes(cluster))


def summary(cluster: Cluster) -> str:
    """The lab in a line."""
    links = sorted({host.link.bytes_per_second for host in cluster.hosts})
    ups = sorted({rack.uplink.bytes_per_second for rack in cluster.racks})
    text = f"lab: {_counted(len(cluster.racks), 'rack')}, {_counted(len(cluster.hosts), 'host')}"
    text += f", links {' and '.join(map(bandwidth_text, links))}"
    if len(cluster.racks) > 1:
        text += f", uplinks {' and '.join(map(bandwidth_text, ups))}"
    return "\n".join([text, *notes(cluster)])


def notes(cluster: Cluster) -> list[str]:
    links = [host.link for host in cluster.hosts] + [rack.uplink for rack in cluster.racks]
    if any(link.latency_seconds for link in links):
        return ["note: the lab keeps to bandwidths only; latencies in the cluster file are not played"]
    return []


def _counted(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
