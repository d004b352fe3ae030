"""Clusters by name hold what their tables say; tiers; how a cluster is shown and asked for."""

import argparse
import csv
import json
import re
from pathlib import Path

import pytest

from helpers.places import GOLDEN
from shoal.cli.cluster_text import narrowest, text
from shoal.cli.main import main
from shoal.cli.options import cluster_label, cluster_of, cluster_options, clusters_of
from shoal.cli.parser import CommandParser
from shoal.errors import InputError
from shoal.planner.cluster import (
    Cluster,
    ClusterLink,
    LinkTier,
    assign_workers,
    find_cluster,
    find_device,
    laptop,
    parse_cluster,
    presets,
    resize_cluster,
    tiers,
)
from shoal.planner.cluster.local_machine import cores, memory_bytes, this_machine

DEVICES = {"V100-SXM2-16/32": "v100-sxm2-32", "CPU AVX512 32c (generic)": "cpu-32c"}
LINK = '[links.host]\nbandwidth = "10 Gbit/s"\n'


def table(name: str) -> list[dict[str, str]]:
    lines = [line for line in (GOLDEN / name).read_text().splitlines() if not line.startswith("#")]
    return list(csv.DictReader(lines))


def named(tier: str, cluster: str, **size: int) -> LinkTier:
    return next(found for found in tiers(find_cluster(cluster, **size)) if found.name == tier)


@pytest.mark.parametrize("row", table("hw_accelerators.csv"), ids=lambda row: row["name"])
def test_every_accelerator_of_the_table_has_a_name(row: dict[str, str]) -> None:
    name = DEVICES.get(row["name"], re.sub(r" ?\(.*", "", row["name"]).lower().replace(" ", "-"))
    device = find_device(name)
    for dtype in ("fp32", "tf32", "bf16", "fp8"):
        said = re.match(r"[0-9.]+", row[f"{dtype}_tflops"])
        assert device.peak.get(dtype) == (None if said is None else float(f"{said[0]}e12"))
    assert device.memory == float(row["mem_gb"]) * 1e9
    assert device.memory_bandwidth == float(row["hbm_gbs"]) * 1e9


@pytest.mark.parametrize("row", table("hw_clusters.csv"), ids=lambda row: row["preset"])
def test_every_cluster_of_the_table_has_its_figures(row: dict[str, str]) -> None:
    name, each = row["preset"].split()[0], int(row["devices_per_node"])
    found = {tier.name: tier for tier in tiers(find_cluster(name, hosts=4))}
    host = found["host"]
    assert host.size == 4 * each
    assert host.shared_bandwidth / 1e9 == pytest.approx(float(row["inter_unidir_gbs_per_device"]), rel=0.01)
    card = float(row["nic_gbps"]) / 8 * max(1, int(row["nics_per_node"]) / each)
    assert host.single_bandwidth / 1e9 == pytest.approx(card)
    assert (host.latency, host.efficiency) == (float(row["inter_alpha_us"]) / 1e6, float(row["inter_eff"]))
    if each == 1:
        assert "inside" not in found
        return
    inside = found["inside"]
    assert (inside.size, inside.shared_bandwidth / 1e9) == (each, float(row["intra_unidir_gbs"]))
    assert (inside.latency, inside.efficiency) == (float(row["intra_alpha_us"]) / 1e6, float(row["intra_eff"]))


def test_other_names() -> None:
    assert find_cluster("gb200") == find_cluster("gb200-nvl72")
    with pytest.raises(InputError, match="there is no cluster dgx-a10\n  fix: did you mean dgx-a100 or "):
        find_cluster("dgx-a10")
    with pytest.raises(InputError, match="there is no cluster xyzzy\n  fix: shoal cluster show lists them"):
        find_cluster("xyzzy")
    with pytest.raises(InputError, match="a100-sxm-80 is a device, but --cluster needs a cluster"):
        find_cluster("a100-sxm-80")
    with pytest.raises(InputError, match="there is no device h100\n  fix: did you mean h100-"):
        find_device("h100")
    with pytest.raises(InputError, match=r"cluster file none.toml cannot be read: No such file"):
        find_cluster("none.toml")


def test_a_dtype_that_a_device_has_no_way_for() -> None:
    volta, tpu = find_device("v100-sxm2-32"), find_device("tpu-v4")
    assert [volta.peak_of(dtype) for dtype in ("fp16", "bf16", "fp8", "tf32")] == [125e12, 125e12, 125e12, 15.7e12]
    assert find_device("k80").peak_of("bf16") == 4.1e12
    with pytest.raises(InputError, match="device tpu-v4 has a peak for bf16 but none for fp32"):
        tpu.peak_of("fp32")


# -- textbook ---------------------------------------------------------------------------------------------------------


def test_two_hosts_of_ten_through_an_uplink_of_ten_are_two_to_one() -> None:
    cluster = parse_cluster(LINK + '[links.rack]\nbandwidth = "10 Gbit/s"\n[[racks]]\ncount = 2\nhosts = 2')
    assert [rack.oversubscription for rack in cluster.racks] == [2, 2]
    host, rack = tiers(cluster)
    assert (host.single_bandwidth, host.shared_bandwidth) == (1.25e9, 1.25e9)
    assert (rack.single_bandwidth, rack.shared_bandwidth) == (1.25e9, 0.625e9)


def test_a_terabyte_over_two_hundred_gigabits_takes_forty_seconds() -> None:
    assert ClusterLink(bytes_per_second=25e9).seconds(1e12) == 40
    assert ClusterLink(bytes_per_second=25e9, latency_seconds=1.5).seconds(1e12) == 41.5


# -- tiers ------------------------------------------------------------------------------------------------------------


def test_the_tiers_of_the_picture() -> None:
    cluster = parse_cluster("""
        hosts = { device = "a100-sxm-80", devices = 8 }
        [links]
        inside = { kind = "nvlink", bandwidth = "300 GB/s" }
        host = { bandwidth = "200 Gbit/s", cards = 8, latency = "15 us" }
        rack = { oversubscription = 4, latency = "20 us" }
        [[racks]]
        count = 2
        hosts = 4
    """)
    assert [
        (tier.name, tier.size, tier.latency, tier.single_bandwidth / 1e9, tier.shared_bandwidth / 1e9)
        for tier in tiers(cluster)
    ] == [("inside", 8, 7e-6, 300, 300), ("host", 32, 15e-6, 25, 25), ("rack", 64, 20e-6, 25, 6.25)]


def test_shared_links_sockets_and_what_is_narrowest() -> None:
    text = """
        hosts = {{ device = "l4", devices = {} }}
        [links]
        inside = {{ kind = "pcie", bandwidth = "16 GB/s", shared = {} }}
        socket = {{ sockets = 2, bandwidth = "20 GB/s" }}
        host = {{ bandwidth = "10 Gbit/s" }}
        [[racks]]
        hosts = 1
        {}"""
    inside, socket = tiers(parse_cluster(text.format(8, "true", "")))
    assert (inside.size, inside.single_bandwidth, inside.shared_bandwidth) == (4, 16e9, 4e9)
    assert (socket.size, socket.single_bandwidth, socket.shared_bandwidth) == (8, 16e9, 4e9)
    inside, socket = tiers(parse_cluster(text.format(8, "false", "")))
    assert (inside.shared_bandwidth, socket.single_bandwidth, socket.shared_bandwidth) == (16e9, 16e9, 5e9)
    unequal = tiers(
        parse_cluster(text.format(8, "false", "[[racks]]\nhosts = 2\ndevices = 4\nlink = { bandwidth = '1 Gb/s' }"))
    )
    assert [(tier.name, tier.size, tier.shared_bandwidth) for tier in unequal] == [
        ("inside", 2, 16e9), ("socket", 4, 5e9), ("host", 8, 31.25e6), ("rack", 16, 31.25e6),
    ]  # fmt: skip
    assert tiers(find_cluster("lab-10g")) == ()


def test_a_lab_has_tiers_though_nobody_said_what_computes() -> None:
    cluster = parse_cluster(LINK + "[hosts]\nworkers = 2\n[[racks]]\nhosts = 2")
    assert [(tier.name, tier.size) for tier in tiers(cluster)] == [("inside", 2), ("host", 4)]
    assert tiers(cluster.with_workers(3))[1].shared_bandwidth == 1.25e9 / 3


# -- sizes ------------------------------------------------------------------------------------------------------------


def test_other_sizes() -> None:
    assert [len(rack.hosts) for rack in find_cluster("dgx-h100", hosts=5, racks=2).racks] == [3, 2]
    pods = find_cluster("meta-grand-teton", hosts=800)
    assert [len(rack.hosts) for rack in pods.racks] == [384, 384, 32]
    assert {round(rack.oversubscription, 9) for rack in pods.racks} == {7}
    assert named("rack", "meta-grand-teton", hosts=768).shared_bandwidth == pytest.approx(50e9 / 7)
    assert find_cluster("dgx-h100", hosts=2, workers=4).workers == 8
    with pytest.raises(InputError, match="2 hosts in 3 racks"):
        find_cluster("dgx-h100", hosts=2, racks=3)
    with pytest.raises(InputError, match="--hosts 0: at least 1"):
        find_cluster("dgx-h100", hosts=0)


def test_a_file_of_another_size(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text(LINK + "[links.rack]\noversubscription = 2\n[[racks]]\ncount = 2\nhosts = 2")
    grown = find_cluster(str(path), hosts=6)
    assert [rack.oversubscription for rack in grown.racks] == [2, 2, 2]
    assert [host.name for host in grown.hosts][-1] == "r2h1"
    path.write_text(LINK + "[[racks]]\nhosts = 2\n[[racks]]\nhosts = 2\nworkers = 2")
    with pytest.raises(
        InputError, match=r"ours.toml has 2 kinds of hosts; only a cluster of equal hosts and uplinks can be resized"
    ):
        find_cluster(str(path), hosts=8)


def test_sixteen_thousand_devices_are_dealt() -> None:
    cluster = find_cluster("meta-grand-teton", hosts=2048)
    slots = assign_workers(cluster, cluster.workers)
    assert len(slots) == 16_384
    assert (slots[-1].local_rank, slots[-1].host_rank, slots[-1].host_count) == (7, 2047, 2048)


def test_this_machine_is_a_guess_of_the_right_size() -> None:
    cluster = this_machine()
    (host,) = cluster.hosts
    assert host.devices == host.workers == cores() and host.device is not None
    assert host.device.memory == memory_bytes() // cores()
    assert laptop(1, 1000).hosts[0].interconnect is None
    assert len(resize_cluster(cluster, 3).hosts) == 3


def given(*words: str) -> argparse.Namespace:
    parser = CommandParser(prog="x")
    cluster_options(parser)
    found: argparse.Namespace = parser.parse_args(words)
    return found


def test_commands_ask_for_a_cluster_in_one_way() -> None:
    assert cluster_of(given("--cluster", "dgx-h100", "--hosts", "128")).devices == 1024
    assert [one.devices for one in clusters_of(given("--cluster", "dgx-h100", "--hosts", "1,2,4"))] == [8, 16, 32]
    assert cluster_label(given("--cluster", "dgx-h100", "--hosts", "2")) == "cluster dgx-h100: 2 hosts, 16 devices"
    assert cluster_of(given()) == this_machine()
    assert "this machine" in cluster_label(given()) and "guessed" in cluster_label(given())
    with pytest.raises(InputError, match="--hosts 1,2: one number is wanted here"):
        cluster_of(given("--cluster", "dgx-h100", "--hosts", "1,2"))
    for wrong in ("0", "two", "1,,2", "-1"):
        with pytest.raises(InputError, match="--hosts"):
            given(f"--hosts={wrong}")


# -- shown ------------------------------------------------------------------------------------------------------------


def test_a_cluster_is_drawn_with_its_narrow_places(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "show", "cloud-100g", "--hosts", "16", "--racks", "4"]) == 0
    drawn = capsys.readouterr().out
    for line in (
        "cloud-100g   4 racks, 16 hosts, 128 devices: 39.94 PFLOP/s bf16, 10.24 TB, 320 USD an hour",
        "└─ 4 racks r0 … r3   uplink 400 Gbit/s, as much as its hosts have",
        "   └─ 4 hosts r0h0 … r0h3   link 100 Gbit/s, 30 us, shared by 8 devices  ◄ narrow",
        "      ├─ nvlink 300 GB/s, 7 us, for each of 8 devices",
        "      └─ 8 × a100-sxm-80   312 TFLOP/s bf16, 80 GB at 2.04 TB/s, 2.5 USD/h",
        "hosts of a rack          32     30 us   12.5 GB/s     1.56 GB/s       reach 80 %   192 × less  ◄ narrowest",
        "narrowest: the link of host r0h0, 100 Gbit/s, which 8 devices share: 1.56 GB/s a device while all send, "
        "192 × less than between devices of a host",
        "next: shoal plan FILE --cluster cloud-100g --hosts 16",
    ):
        assert line in drawn.splitlines()


def test_oversubscription_and_sockets_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = narrowest(find_cluster("meta-grand-teton", hosts=768))
    assert found is not None and found.tier == "rack"
    assert "7:1 oversubscribed: 7.14 GB/s a device while all send, 7 × less than between hosts" in found.sentence
    path = tmp_path / "box.toml"
    path.write_text(
        '[hosts]\ndevice = "l4"\ndevices = 4\n[links.inside]\nkind = "pcie"\nbandwidth = "16 GB/s"\nshared = true\n'
        '[links.socket]\nsockets = 2\nbandwidth = "10 GB/s"\n' + LINK + "[[racks]]\nhosts = ['a', 'b']\n"
        "[[racks]]\nname = 'c'\nhosts = 1\ndevices = 1"
    )
    assert main(["cluster", "show", str(path)]) == 0
    drawn = capsys.readouterr().out
    assert "pcie 16 GB/s, shared by 2 devices on each of 2 sockets  ◄ narrow" in drawn
    assert "between sockets 10 GB/s, shared by 2 devices on each side  ◄ narrow" in drawn
    assert "2 hosts a … b" in drawn and "rack c" in drawn and "1 × l4" in drawn
    alone = text(Cluster(racks=find_cluster(str(path)).racks[1:]), "c")
    assert "one device: no links" in alone and "narrowest" not in alone
    socket = narrowest(parse_cluster(path.read_text().split("[[racks]]")[0] + "[[racks]]\nhosts = 1"))
    assert socket is not None and "the link between the sockets of host r0h0, 10 GB/s: 5 GB/s" in socket.sentence


def test_presets_are_listed_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "show"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1 : 1 + len(presets())]] == list(presets())
    assert "8 × a100-sxm-80" in next(line for line in lines if line.startswith("dgx-a100 "))
    assert "tpu-v5p" in " ".join(lines[1 + len(presets()) :])  # devices that a file can name


def test_the_same_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "show", "dgx-a100", "--hosts", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["hosts"], found["devices"], found["narrowest"]["tier"]) == (4, 32, "host")
    assert [tier["shared_bandwidth"] for tier in found["tiers"]] == [300e9, 25e9]
    assert found["kinds"]["a100-sxm-80"]["memory"] == 80e9
    assert found["racks"][0]["hosts"][0]["names"] == ["r0h0", "r0h1", "r0h2", "r0h3"]
    assert main(["cluster", "show", "--json"]) == 0
    assert [one["name"] for one in json.loads(capsys.readouterr().out)] == list(presets())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["show", "dgx-a10"], "there is no cluster dgx-a10"),
        (["show", "--hosts", "2"], "--hosts 2: of which cluster?"),
        (["shw"], "did you mean show?"),
        ([], "show or probe?"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", *words]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("name", ["dgx-a100", "DGX-A100", "dgx-a100 (Selene)", "selene"])
def test_a_preset_is_found_however_tables_write_it(name: str) -> None:
    assert find_cluster(name, hosts=2) == find_cluster("dgx-a100", hosts=2)
