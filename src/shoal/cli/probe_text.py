"""What `shoal cluster probe` prints: the speed of a core, of workers at once, and of the links between them."""

from shoal.driver.probe_machine import ProbeResult
from shoal.planner.cluster import Cluster, bandwidth_text, latency_text
from shoal.report import human


def text(found: ProbeResult, cluster: Cluster) -> str:
    device = cluster.hosts[0].device
    assert device is not None
    lines = [f"{found.cores} core{'s' if found.cores > 1 else ''}, {human.size(found.memory)} of memory"]
    share = found.cores / cluster.devices
    lines += [f"shared by {cluster.devices} workers: each is {share:.2g} of a core", ""] if share < 1 else [""]
    products = ", ".join(f"{name} {peak / 1e9:.4g} GFLOP/s" for name, peak in device.peak.items())
    lines.append(f"  products    {products}; {device.efficiency:.0%} of that on the whole,")
    lines.append(f"              half of it at {device.half_flops / 1e6:.3g} MFLOP")
    far, near = found.speed.memory_speed / 1e9, found.speed.cache_speed / 1e9
    lines.append(f"  memory      {far:.3g} GB/s read and written, {near:.3g} GB/s where a cache helps as in training")
    lines.append(
        f"  operators   {1e6 * device.overhead:.3g} us of Python and torch around each; slowest for its bytes:"
    )
    slow = sorted((rate, name) for name, rate in device.rates.items() if not _is_product(name))[:3]
    lines.append("              " + ", ".join(f"{name} {rate / 1e9:.2g} GB/s" for rate, name in slow))
    lines.append(
        f"  models      {found.speed.model_slowdown:.2f} times as long as their operators by themselves"
        " (the file has it)"
    )
    lines += _contention_lines(found)
    lines += ["", f"  {'level':8} {'latency':>10} {'bandwidth':>14}"]
    for level, (latency, bandwidth) in found.links.items():
        lines.append(f"  {level:8} {latency_text(latency):>10} {bandwidth_text(bandwidth):>14}")
    if found.reduce_speed is not None and found.barrier_seconds is not None:
        lines.append(
            f"  {'merge':8} {latency_text(found.barrier_seconds):>10} {bandwidth_text(found.reduce_speed):>14}"
        )
    return "\n".join(lines)


def _is_product(name: str) -> bool:
    return name in ("mm", "addmm", "bmm", "baddbmm") or name.startswith(("convolution", "_scaled_dot_product"))


def _contention_lines(found: ProbeResult) -> list[str]:
    alone, lines = found.contention[1], []
    for count, crowd in sorted(found.contention.items()):
        turns = max(1.0, count / found.cores)
        product, stream = crowd.product / alone.product * turns, crowd.stream / alone.stream * turns
        lines.append(f"{count}: {product:.2f} and {stream:.2f}")
    return [f"  at once     times as long for products and for memory, by workers: {'; '.join(lines)}"]
