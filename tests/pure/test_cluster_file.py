"""Devices, what is inside hosts, unequal racks: read, refused with their line, and written again."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.places import ROOT
from shoal.errors import InputError
from shoal.planner.cluster import (
    Cluster,
    ClusterHost,
    ClusterLink,
    Device,
    HostInterconnect,
    Rack,
    cluster_text,
    find_cluster,
    parse_cluster,
    presets,
)
from shoal.planner.cluster.toml_lines import key_lines, line_of
from shoal.planner.cluster.units import WRITTEN, exact_text, read_quantity

FILE = """\
[devices.ours]
peak = { fp32 = "20 TFLOP/s", fp16 = "100 TFLOP/s" }
memory = "24 GB"
memory_bandwidth = "900 GB/s"
price = "0.8 USD/h"
efficiency = 0.7
half_flops = "2 GFLOP"
overhead = "4 us"
reserved = "1 GiB"

[devices.v100-sxm2-16]       # known by name: only what differs
price = "1.1 USD/h"

[hosts]
device = "ours"
devices = 4

[links.inside]
kind = "pcie"
bandwidth = "16 GB/s"
shared = true

[links.socket]
sockets = 2
bandwidth = "20 GB/s"
latency = "2 us"

[links.host]
bandwidth = "25 Gbit/s"
cards = 2
latency = "15 us"
efficiency = 0.9

[links.rack]
oversubscription = 4

[[racks]]
count = 2
hosts = 3

[[racks]]
name = "old"
device = "v100-sxm2-16"
[[racks.hosts]]
name = "big"
[[racks.hosts]]
count = 2
devices = 1
workers = 2
link = { bandwidth = "1 Gbit/s" }
"""


def test_a_file_says_what_computes_and_what_connects() -> None:
    cluster = parse_cluster(FILE)
    first, old = cluster.racks[0], cluster.racks[2]
    host = first.hosts[0]
    assert host.device == Device(
        name="ours", peak={"fp32": 20e12, "bf16": 100e12}, memory=24_000_000_000, memory_bandwidth=900e9, price=0.8,
        efficiency=0.7, half_flops=2e9, overhead=4e-6, reserved=1 << 30,
    )  # fmt: skip
    between = ClusterLink(bytes_per_second=20e9, latency_seconds=2e-6)
    pcie = ClusterLink(bytes_per_second=16e9)
    assert host.interconnect == HostInterconnect(link=pcie, kind="pcie", shared=True, sockets=2, between=between)
    assert (host.devices, host.workers, host.cards) == (4, 4, 2)
    assert host.link == ClusterLink(bytes_per_second=6.25e9, latency_seconds=15e-6, efficiency=0.9)
    assert first.uplink == ClusterLink(bytes_per_second=3 * 6.25e9 / 4, efficiency=0.9)
    assert [(host.name, host.devices, host.workers) for host in old.hosts] == [
        ("big", 4, 4),
        ("oldh1", 1, 2),
        ("oldh2", 1, 2),
    ]
    assert {host.device.price for host in old.hosts if host.device} == {1.1}
    assert {host.device.memory for host in old.hosts if host.device} == {16_000_000_000}
    assert old.hosts[1].interconnect is None and old.hosts[1].link.bytes_per_second == 125e6
    assert cluster.devices == 6 * 4 + 4 + 2


@pytest.mark.parametrize("name", ["the file", *presets()])
def test_what_is_written_is_read_again(name: str) -> None:
    cluster = parse_cluster(FILE) if name == "the file" else find_cluster(name, hosts=3, racks=2)
    assert parse_cluster(cluster_text(cluster)) == cluster


def test_figures_of_a_probe_survive_to_the_last_bit() -> None:
    rates = {"aten.gelu": 2e9 / 3, "conv 2d": 7e7}
    device = Device(name="core.of-this", peak={"fp32": 1e11 / 3}, memory=4_123_456_789, memory_bandwidth=1e10 / 7,
                    half_flops=0.0, overhead=1 / 3e5, crowded=1.37, rates=rates)  # fmt: skip
    inside = HostInterconnect(
        link=ClusterLink(bytes_per_second=1e10 / 9, latency_seconds=1e-5 / 7), kind="memory", shared=True
    )
    link = ClusterLink(bytes_per_second=1e9 / 7)
    host = ClusterHost(
        name="here", rack="r0", workers=2, devices=2, device=device, interconnect=inside, link=link, cards=3
    )
    far = replace(host, name="there", link=ClusterLink(bytes_per_second=1e9 / 11, efficiency=0.123456789))
    cluster = Cluster(racks=(Rack(name="r0", hosts=(host, far), uplink=ClusterLink(bytes_per_second=1e8 / 3)),))
    assert parse_cluster(cluster_text(cluster)) == cluster


@given(st.sampled_from(sorted(WRITTEN)), st.floats(min_value=1e-9, max_value=1e21))
def test_any_quantity_is_written_exactly(kind: str, value: float) -> None:
    assert read_quantity(exact_text(value, kind), WRITTEN[kind][0], "") == value


def test_a_device_that_is_described_whole_takes_nothing_from_another_of_its_name() -> None:
    whole = changed("[devices.ours]", "[devices.l4]").replace('device = "ours"', 'device = "l4"')
    host = parse_cluster(whole.replace('price = "0.8 USD/h"\n', "").replace("efficiency = 0.7\n", "")).hosts[0]
    assert host.device is not None and host.device.price is None and host.device.efficiency == 0.8


def test_two_devices_of_one_name_cannot_be_written() -> None:
    cluster = find_cluster("lab-10g", hosts=2)
    (rack,) = cluster.racks
    one, other = rack.hosts
    assert other.device is not None
    other = replace(other, device=replace(other.device, memory=1))
    with pytest.raises(InputError, match="two devices are named rtx4090"):
        cluster_text(Cluster(racks=(replace(rack, hosts=(one, other)),)))


def changed(old: str, new: str) -> str:
    assert FILE.count(old) == 1, f"{old!r} is {FILE.count(old)} times in the file"
    return FILE.replace(old, new)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        # missing: the line is that of the table
        (changed('memory = "24 GB"\n', ""), "c.toml:1: devices.ours.memory is missing\n  fix: memory = "),
        (changed('memory_bandwidth = "900 GB/s"\n', ""), "c.toml:1: devices.ours.memory_bandwidth is missing"),
        (changed('kind = "pcie"\n', ""), 'c.toml:18: links.inside.kind is missing\n  fix: kind = "nvlink", or pcie'),
        (changed("sockets = 2\n", ""), "c.toml:23: links.socket.sockets is missing"),
        (
            changed('[links.inside]\nkind = "pcie"\nbandwidth = "16 GB/s"\nshared = true\n', ""),
            "links.inside is missing\n  fix: .*beside the sockets",
        ),
        (
            '[hosts]\ndevice = "l4"\ndevices = 2\n[links.host]\nbandwidth = "1 Gb/s"\n[[racks]]\nhosts = 1',
            r"c.toml:3: 2 devices l4 in a host, but no link between them\n  fix: \[links.inside\]",
        ),
        # contradictory
        (changed("sockets = 2", "sockets = 3"), "c.toml:24: 4 devices in a host, but links.socket.sockets 3"),
        (changed('"1 GiB"', '"24 GB"'), "c.toml:9: devices.ours.reserved 24 GB of devices.ours.memory 24 GB: nothing"),
        (changed('fp16 = "100', 'bf16 = "90 TFLOP/s", fp16 = "100'), "c.toml:2: .* bf16 90 .* and fp16 100 .* one"),
        (changed('"0.8 USD/h"', '"0.8 EUR/h"'), "device ours is paid in EUR, device v100-sxm2-16 in USD"),
        (
            changed('device = "ours"', 'device = "l4"'),
            "c.toml:1: device ours is described, but no host has it\n  fix: .hosts. with device",
        ),
        (
            changed("oversubscription = 4", 'oversubscription = 4\nbandwidth = "1 Gb/s"'),
            "c.toml:3[45]: links.rack.bandwidth 1 Gb/s and links.rack.oversubscription 4",
        ),
        # wrong
        (changed("efficiency = 0.7", "efficiency = 70"), "c.toml:6: devices.ours.efficiency is 70, .* at most 1"),
        (changed('"0.8 USD/h"', "0.8"), "c.toml:5: devices.ours.price is 0.8, .* a currency .* USD/h"),
        (changed('"0.8 USD/h"', '"0.8 USD"'), "c.toml:5: devices.ours.price is '0.8 USD'"),
        (changed("shared = true", 'shared = "yes"'), "c.toml:21: links.inside.shared is 'yes', .* true or false"),
        (changed('kind = "pcie"', 'kind = "pci"'), r"c.toml:19: links.inside.kind is 'pci', .* \(pcie\?\)"),
        (changed("cards = 2", "cards = 0"), "c.toml:30: links.host.cards is 0"),
        (changed('fp32 = "20 TFLOP/s"', "fp32 = 20"), "c.toml:2: devices.ours.peak.fp32 is 20, .* its unit"),
        (changed('fp32 = "20 TFLOP/s"', 'fp32 = "20 TFLOPS"'), "unit 'TFLOPS'\n  fix: did you mean TFLOP/s"),
        (changed("workers = 2", "workers = 0"), r"c.toml:49: racks\[1\].hosts\[1\].workers is 0"),
        # unknown
        (changed("efficiency = 0.7", "eficiency = 1"), "c.toml:6: unknown key devices.ours.eficiency\n.*efficiency"),
        (changed("fp32 =", "fp31 ="), "c.toml:2: unknown key devices.ours.peak.fp31\n  fix: did you mean fp32"),
        (changed('device = "ours"', 'device = "a100"'), "c.toml:15: hosts.device is 'a100': .*did you mean a100-"),
        (changed('name = "big"', 'nam = "big"'), r"c.toml:45: unknown key racks\[1\].hosts\[0\].nam"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said_with_its_line_and_device(text: str, told: str) -> None:
    with pytest.raises(InputError) as error:
        parse_cluster(text, source="c.toml")
    assert re.search(told, str(error.value), re.DOTALL), str(error.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("300", 'bits or bytes\\? "300 Gbit/s" is 37.5 GB/s'),
        ("100 Gb", r"did you mean Gb/s\? 100 Gbit/s would be 12.5 GB/s, and not 100 GB/s"),
        ("100 gb/s", r"did you mean Gb/s\? 100 Gbit/s would be 12.5 GB/s, and not 100 GB/s"),
        ("100 G", r"did you mean Gb/s\? 100 Gbit/s would be 12.5 GB/s, and not 100 GB/s"),
        ("100 GB", "unknown unit 'GB'\n  fix: did you mean GB/s"),
        ("100 gbit/s", "unknown unit 'gbit/s'\n  fix: did you mean Gbit/s"),
        ("100 GBps", "unknown unit 'GBps'\n  fix: did you mean GB/s"),
    ],
)
def test_a_bandwidth_is_bits_or_bytes_and_never_a_guess(text: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        parse_cluster(f'[links.host]\nbandwidth = "{text}"\n[[racks]]\nhosts = 2')


def test_memory_is_no_guess_either() -> None:
    with pytest.raises(InputError, match=r"did you mean GB\? 24 Gbit would be 3 GB, and not 24 GB"):
        parse_cluster(changed('"24 GB"', '"24 Gb"'))
    with pytest.raises(InputError, match=r"devices.ours.memory is 24, and should be a number with its unit"):
        parse_cluster(changed('"24 GB"', "24"))


def test_lines_of_keys() -> None:
    lines = key_lines(
        'a = 1\ntext = """\n[not.a.table]\nb = 2\n"""\n[x."y z"]\nq.r = 3\n[[t]]\n[[t]]\n[[t.u]]\nk = [\n]\n'
    )
    assert {key: lines[key] for key in ("a", "x.y z", "x.y z.q.r", "t[0]", "t[1]", "t[1].u[0].k")} == {
        "a": 1, "x.y z": 6, "x.y z.q.r": 7, "t[0]": 8, "t[1]": 9, "t[1].u[0].k": 11,
    }  # fmt: skip
    assert "b" not in lines and "not.a.table" not in lines
    assert [line_of(lines, key) for key in ("t[1].u[0].k[3].deep", "t[0].gone", "x.gone", "gone")] == [
        11,
        8,
        None,
        None,
    ]


def test_the_files_of_the_docs_are_good() -> None:
    page = ROOT / "docs" / "cluster.md"
    if not page.exists():
        pytest.skip("not in a checkout")
    texts = re.findall(r"^```toml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert texts and all(parse_cluster(text).devices for text in texts)
