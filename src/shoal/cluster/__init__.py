"""What to train on: devices in hosts in racks, and the links between them. Pure."""

from shoal.cluster.deal import ORDERS, Order, Slot, deal
from shoal.cluster.parts import Cluster, Device, Host, Inside, Link, Rack
from shoal.cluster.reading import even_cluster, parse_cluster, read_cluster
from shoal.cluster.tiers import Tier, tiers
from shoal.cluster.units import bandwidth_text, latency_text

__all__ = [
    "ORDERS",
    "Cluster",
    "Device",
    "Host",
    "Inside",
    "Link",
    "Order",
    "Rack",
    "Slot",
    "Tier",
    "bandwidth_text",
    "deal",
    "even_cluster",
    "latency_text",
    "parse_cluster",
    "read_cluster",
    "tiers",
]
