"""Describes what to train on: devices in hosts in racks, and the links between them. Pure."""

from shoal.planner.cluster.assign import ORDERS, Order, WorkerSlot, assign_workers
from shoal.planner.cluster.cluster import Cluster, ClusterHost, ClusterLink, Device, HostInterconnect, Rack
from shoal.planner.cluster.parse import even_cluster, parse_cluster, read_cluster
from shoal.planner.cluster.presets import find_cluster, find_device, laptop, presets, resize_cluster
from shoal.planner.cluster.tiers import LinkTier, tiers
from shoal.planner.cluster.units import bandwidth_text, bytes_text, flops_text, latency_text
from shoal.planner.cluster.write import cluster_text

__all__ = [
    "ORDERS", "Cluster", "ClusterHost", "ClusterLink", "Device", "HostInterconnect", "LinkTier", "Order", "Rack",
    "WorkerSlot", "assign_workers", "bandwidth_text", "bytes_text", "cluster_text", "even_cluster", "find_cluster",
    "find_device", "flops_text", "laptop", "latency_text", "parse_cluster", "presets", "read_cluster",
    "resize_cluster", "tiers",
]  # fmt: skip
