"""Reads the devices of a cluster file."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from shoal.planner.cluster.cluster import Device, Rack
from shoal.planner.cluster.library import device_tables
from shoal.planner.cluster.table_reader import TableReader
from shoal.planner.cluster.units import BANDWIDTHS, FLOPS, LATENCIES, OPERATORS, RATES, SIZES, UnitError, read_price

DEVICE_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,38}[A-Za-z0-9])?")
DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8")
DEVICE_KEYS = ("peak", "memory", "memory_bandwidth", "price", "efficiency", "half_flops", "stream", "overhead",
               "reserved", "crowded", "rates")  # fmt: skip
NEEDED = {
    "peak": 'peak = { bf16 = "312 TFLOP/s", fp32 = "19.5 TFLOP/s" }',
    "memory": 'memory = "80 GB"',
    "memory_bandwidth": 'memory_bandwidth = "2039 GB/s"',
}


def device_from(name: str, table: Mapping[str, Any]) -> Device:
    return DeviceReader(source=f"device {name}").device(name, table)


@dataclass(frozen=True, kw_only=True)
class DeviceReader(TableReader):
    def _devices(self, value: Mapping[str, Any]) -> dict[str, Device]:
        tables = value.get("devices", {})
        if not isinstance(tables, dict):
            raise self._wrong("devices", tables, "tables: [devices.NAME]")
        found = {}
        for name, table in tables.items():
            if not DEVICE_NAME.fullmatch(name):
                raise self._wrong("devices", name, "a name of letters, digits, dots and hyphens")
            if not isinstance(table, dict):
                raise self._wrong(f"devices.{name}", table, f"a table with {', '.join(DEVICE_KEYS)}")
            complete = all(key in table for key in NEEDED)  # else it changes the known device of that name
            found[name] = self.device(name, table if complete else {**device_tables().get(name, {}), **table})
        return found

    def device(self, name: str, table: Mapping[str, Any]) -> Device:
        key = f"devices.{name}"
        self._known(table, key, DEVICE_KEYS)
        for needed, example in NEEDED.items():
            if needed not in table:
                raise self._missing(f"{key}.{needed}", example)
        memory = round(self._quantity(table["memory"], f"{key}.memory", SIZES, '"80 GB"'))
        more: dict[str, Any] = {}
        for share in ("efficiency", "stream"):
            if share in table:
                more[share] = self._share(table[share], f"{key}.{share}")
        if "half_flops" in table:
            more["half_flops"] = self._quantity(table["half_flops"], f"{key}.half_flops", FLOPS, '"5 GFLOP"')
        if "overhead" in table:
            more["overhead"] = self._quantity(table["overhead"], f"{key}.overhead", LATENCIES, '"5 us"')
        if "reserved" in table:
            more["reserved"] = round(self._quantity(table["reserved"], f"{key}.reserved", SIZES, '"1 GB"'))
            if more["reserved"] >= memory:
                problem = f"{key}.reserved {table['reserved']} of {key}.memory {table['memory']}: nothing is left"
                raise self._error(f"{key}.reserved", problem, "less than the memory")
        if "crowded" in table:
            more["crowded"] = crowded = table["crowded"]
            if isinstance(crowded, bool) or not isinstance(crowded, int | float) or crowded < 1:
                raise self._wrong(f"{key}.crowded", crowded, "a number from 1 up")
        if "rates" in table:
            rates = table["rates"]
            if not isinstance(rates, dict):
                raise self._wrong(f"{key}.rates", rates, 'a table by operator, such as { conv2d = "2 G/s" }')
            more["rates"] = {op: self._quantity(rates[op], f"{key}.rates.{op}", OPERATORS, '"2 G/s"') for op in rates}
        if "price" in table:
            try:
                more["price"], more["currency"] = read_price(table["price"])
            except UnitError as error:
                raise self._wrong(f"{key}.price", table["price"], error.problem) from None
        speed = self._quantity(table["memory_bandwidth"], f"{key}.memory_bandwidth", BANDWIDTHS, '"2039 GB/s"')
        peak = self._peak(table["peak"], f"{key}.peak")
        return Device(name=name, peak=peak, memory=memory, memory_bandwidth=speed, **more)

    def _peak(self, value: Any, key: str) -> dict[str, float]:
        if not isinstance(value, dict) or not value:
            raise self._wrong(key, value, 'a table by dtype, such as { bf16 = "312 TFLOP/s" }')
        self._known(value, key, DTYPES)
        given = [dtype for dtype in DTYPES if dtype in value]
        found = {dtype: self._quantity(value[dtype], f"{key}.{dtype}", RATES, '"312 TFLOP/s"') for dtype in given}
        if "fp16" in found:  # one number for both
            half = found.pop("fp16")
            if found.get("bf16", half) != half:
                problem = f"{key}: bf16 {value['bf16']} and fp16 {value['fp16']}, but both have one peak"
                raise self._error(f"{key}.fp16", problem, "leave one out")
            found["bf16"] = half
        return found

    def _device_named(self, name: Any, key: str, devices: Mapping[str, Device]) -> Device:
        if isinstance(name, str) and name in devices:
            return devices[name]
        if isinstance(name, str) and name in device_tables():
            return device_from(name, device_tables()[name])
        known = [*devices, *device_tables()]
        near = get_close_matches(str(name).lower(), known, n=3, cutoff=0.4)
        fix = f"did you mean {' or '.join(near)}?" if near else f"[devices.{name}] with peak, memory, memory_bandwidth"
        raise self._error(key, f"{key} is {name!r}: neither the file nor the presets have this device", fix)

    def _used(self, devices: Mapping[str, Device], racks: Sequence[Rack]) -> None:
        used = {host.device.name: host.device for rack in racks for host in rack.hosts if host.device}
        for name in devices:
            if name not in used:
                problem = f"device {name} is described, but no host has it"
                raise self._error(f"devices.{name}", problem, f'[hosts] with device = "{name}"')
        money = {device.currency: name for name, device in used.items() if device.price is not None}
        if len(money) > 1:
            (one, first), (other, second) = list(money.items())[:2]
            problem = f"device {first} is paid in {one}, device {second} in {other}: costs cannot be added"
            key = next((f"devices.{name}.price" for name in (second, first) if name in devices), "devices")
            raise self._error(key, problem, f'one currency, such as [devices.{second}] price = "2.5 {one}/h"')
