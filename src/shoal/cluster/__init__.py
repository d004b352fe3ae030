"""What to train on: devices in hosts in racks, and the links between them. Pure."""

from shoal.cluster.deal import ORDERS, Order, Slot, deal
from shoal.cluster.parts import Cluster, Device, Host, Inside, Link, Rack
from shoal.cluster.presets import find_cluster, find_device, laptop, presets, resized
from shoal.cluster.reading import even_cluster, parse_cluster, read_cluster
from shoal.cluster.tiers import Tier, tiers
from shoal.cluster.units import bandwidth_text, bytes_text, flops_text, latency_text
from shoal.cluster.writing import cluster_text

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
    "bytes_text",
    "cluster_text",
    "deal",
    "even_cluster",
    "find_cluster",
    "find_device",
    "flops_text",
    "laptop",
    "latency_text",
    "parse_cluster",
    "presets",
    "read_cluster",
    "resized",
    "tiers",
]
