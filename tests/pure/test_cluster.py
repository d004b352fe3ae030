"""A cluster file becomes a checked value, and workers are dealt to its hosts."""

import re

import pytest

from helpers.places import DOCS
from shoal.driver.launchers.lab_network import fabric_links, fabric_rates, picture, summary
from shoal.errors import InputError
from shoal.planner.cluster import (
    Cluster,
    ClusterLink,
    Order,
    assign_workers,
    bandwidth_text,
    even_cluster,
    latency_text,
    parse_cluster,
)

LINK = '[links.host]\nbandwidth = "1 Gbit/s"\n'
FILE = """\
[links.host]
bandwidth = "10 Gbit/s"
latency = "50 us"

[links.rack]
oversubscription = 2

[hosts]
workers = 2

[[racks]]
count = 2
hosts = 3

[[racks]]
name = "annex"
hosts = ["a", "b"]
workers = 1
link = { bandwidth = "125 MB/s" }
uplink = { bandwidth = "500 Mbit/s", latency = "1.5 ms" }
"""


def test_a_file_says_it_all() -> None:
    cluster = parse_cluster(FILE)
    assert [rack.name for rack in cluster.racks] == ["r0", "r1", "annex"]
    assert [host.name for host in cluster.hosts] == ["r0h0", "r0h1", "r0h2", "r1h0", "r1h1", "r1h2", "a", "b"]
    first, annex = cluster.racks[0], cluster.racks[2]
    assert first.hosts[0].link.bytes_per_second == 1.25e9
    assert first.hosts[0].link.latency_seconds == pytest.approx(50e-6)
    assert first.uplink == ClusterLink(bytes_per_second=1.875e9)  # 3 × 10 Gbit/s over 2
    assert annex.hosts[0].link == ClusterLink(bytes_per_second=1.25e8)
    assert annex.uplink == ClusterLink(bytes_per_second=6.25e7, latency_seconds=1.5e-3)
    assert annex.oversubscription == 4
    assert [host.workers for host in cluster.hosts] == [2] * 6 + [1] * 2
    assert cluster.workers == 14


def test_the_file_of_the_docs_is_one() -> None:
    page = DOCS / "lab.md"
    if not page.exists():
        pytest.skip("not in a checkout")
    (text,) = re.findall(r"^```toml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert parse_cluster(text).racks[0].oversubscription == 4


def test_two_links_of_ten_through_an_uplink_of_ten_are_two_to_one() -> None:
    assert even_cluster(link="10 Gbit/s", uplink="10 Gbit/s").racks[0].oversubscription == 2


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("racks", "c.toml is not TOML"),
        ("", r"racks is missing\n  fix: \[\[racks\]\]"),
        ("racks = 3", r"racks is 3, and should be tables"),
        ("[[racks]]\nhosts = 2", "links.host.bandwidth is missing\n  fix: bandwidth = "),
        (LINK + "[[racks]]\nname = 'a'", r"racks\[0\].hosts is missing"),
        (LINK + "[[racks]]\nhosts = 0", r"racks\[0\].hosts is 0, and should be a whole number from 1 up"),
        (LINK + "[[racks]]\nhost = 2", r"unknown key racks\[0\].host\n  fix: did you mean hosts\?"),
        ("[link.host]", r"unknown key link\n  fix: did you mean links\?"),
        ("[links.host]\nbandwith = '1'", r"unknown key links.host.bandwith\n  fix: did you mean bandwidth\?"),
        ("[links.host]\nbandwidth = 1\n[[racks]]\nhosts = 1", "links.host.bandwidth is 1, and should be .* its unit"),
        ("[links.host]\nbandwidth = '0 bit/s'\n[[racks]]\nhosts = 1", "is '0 bit/s', and should be above 0"),
        ("[links.host]\nbandwidth = '1 Gbps'\n[[racks]]\nhosts = 1", r"unit 'Gbps'\n  fix: did you mean Gb/s\?"),
        (LINK + "latency = '50'\n[[racks]]\nhosts = 1", "links.host.latency is '50', and should be .* \"50 us\""),
        (LINK + "[links.rack]\noversubscription = 0\n[[racks]]\nhosts = 1", "oversubscription is 0, and should be"),
        (
            LINK + "[links.rack]\noversubscription = 4\nbandwidth = '1 Gbit/s'\n[[racks]]\nhosts = 1",
            "links.rack.bandwidth 1 Gbit/s and links.rack.oversubscription 4: both give",
        ),
        (LINK + "[hosts]\nworkers = true\n[[racks]]\nhosts = 1", "hosts.workers is True, and should be"),
        (LINK + "[[racks]]\nhosts = ['a', 'a']", "two hosts are named a"),
        (LINK + "[[racks]]\nhosts = ['A/b']", r"racks\[0\].hosts is 'A/b', and should be a name"),
        (LINK + "[[racks]]\nname = 'x'\ncount = 2\nhosts = 1", r"one name, 'x', for 2 racks"),
    ],
)
def test_what_does_not_fit_is_said_with_its_key(text: str, told: str) -> None:
    with pytest.raises(InputError) as error:
        parse_cluster(text, source="c.toml")
    assert re.search(told, str(error.value), re.DOTALL) and str(error.value).startswith("c.toml")


def test_a_wrong_flag_is_called_by_its_name() -> None:
    with pytest.raises(InputError, match="--link is 'fast', and should be"):
        even_cluster(link="fast")
    with pytest.raises(InputError, match="--uplink 1 Gbit/s and --oversubscription 2"):
        even_cluster(uplink="1 Gbit/s", oversubscription=2)


TWO_BY_TWO = even_cluster()
UNEVEN = parse_cluster(LINK + "[[racks]]\nhosts = 2\n[[racks]]\nhosts = ['big']\nworkers = 2")


@pytest.mark.parametrize(
    ("cluster", "workers", "order", "hosts"),
    [
        (TWO_BY_TWO, 1, "blocks", "r0h0"),
        (TWO_BY_TWO, 4, "blocks", "r0h0 r0h1 r1h0 r1h1"),
        (TWO_BY_TWO, 4, "interleaved", "r0h0 r1h0 r0h1 r1h1"),
        (TWO_BY_TWO, 2, "interleaved", "r0h0 r1h0"),
        (TWO_BY_TWO, 6, "blocks", "r0h0 r0h0 r0h1 r0h1 r1h0 r1h1"),
        (TWO_BY_TWO, 6, "interleaved", "r0h0 r1h0 r0h1 r1h1 r0h0 r1h0"),
        (UNEVEN, 4, "blocks", "r0h0 r0h1 big big"),
        (UNEVEN, 4, "interleaved", "r0h0 big r0h1 big"),
        (UNEVEN, 3, "blocks", "r0h0 r0h1 big"),
    ],
)
def test_workers_are_dealt(cluster: Cluster, workers: int, order: Order, hosts: str) -> None:
    assert " ".join(slot.host.name for slot in assign_workers(cluster, workers, order)) == hosts


def test_a_slot_knows_who_it_is_on_its_host() -> None:
    slots = assign_workers(TWO_BY_TWO, 6, "interleaved")
    assert [(slot.local_rank, slot.local_size) for slot in slots] == [(0, 2), (0, 2), (0, 1), (0, 1), (1, 2), (1, 2)]
    assert [(slot.host_rank, slot.host_count) for slot in slots] == [(n, 4) for n in (0, 1, 2, 3, 0, 1)]


@pytest.mark.parametrize("text", ["1 Gbit/s", "500 Mbit/s", "64 kbit/s", "8 bit/s", "1.5 Tbit/s"])
def test_bandwidths_are_written_as_they_are_read(text: str) -> None:
    assert bandwidth_text(even_cluster(link=text).hosts[0].link.bytes_per_second) == text


def test_latencies_are_written_as_they_are_read() -> None:
    assert [latency_text(seconds) for seconds in (2.0, 1.5e-3, 50e-6, 3e-9)] == ["2 s", "1.5 ms", "50 us", "3 ns"]


def test_the_network_of_two_racks() -> None:
    cluster = even_cluster(hosts=1, link="1 Gbit/s", uplink="80 Mbit/s")
    assert fabric_links(cluster, ["/a", "/b"]) == [
        "link add spine type bridge",
        "link set spine up",
        "link add rack0 type bridge",
        "link set rack0 up",
        "link add up0 type veth peer name down0",
        "link set up0 master rack0 up",
        "link set down0 master spine up",
        "link add r0h0 type veth peer name eth0 netns /a",
        "link set r0h0 master rack0 up",
        "link add rack1 type bridge",
        "link set rack1 up",
        "link add up1 type veth peer name down1",
        "link set up1 master rack1 up",
        "link set down1 master spine up",
        "link add r1h0 type veth peer name eth0 netns /b",
        "link set r1h0 master rack1 up",
    ]
    rates = {line.split()[3]: line.split()[7] for line in fabric_rates(cluster)}
    assert rates == dict.fromkeys(("up0", "down0", "up1", "down1"), "80000000bit") | dict.fromkeys(
        ("r0h0", "r1h0"), "1000000000bit"
    )


def test_the_picture_names_every_host_and_what_is_not_played() -> None:
    cluster = parse_cluster(FILE)
    drawn = picture(cluster)
    for words in ("rack annex", "4:1 oversubscribed", "host a ", "10.77.2.1", "link 10 Gbit/s", "2 workers"):
        assert words in drawn
    assert "latencies in the cluster file are not played" in drawn and "not played" in summary(cluster)
    assert "not played" not in picture(TWO_BY_TWO)
