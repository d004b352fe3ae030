"""Training between hosts beside torch's DDP on gloo:   python benchmarks/hosts.py   (root on Linux; eleven minutes)

Hosts are those of a lab, with one worker each. Rounds are interleaved: the lab of a cell stays up, and each contender
trains a few steps in each round, so that whatever else the machine does falls on all of them. Further sections:
messages from one host to another (p2p), and what encryption costs (tls). Prints ratios and writes results/hosts.json.
What is measured and how to read it: README.md here.
"""

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch._dynamo  # optimizers load it at their first step; loaded here once, every forked process has it
import torch.distributed as dist

import cases
from collectives import BACKENDS, COLLECTIVES, Row, interleaved, shown_time
from contenders import Measured, ddp, forked, in_turns, scratch_folder, shoal_with
from shoal.collectives import connect_peers
from shoal.collectives.choose_algorithm import readable_bytes
from shoal.driver.launchers.lab import Lab
from shoal.errors import ShoalError
from shoal.planner.cluster import Cluster, Order, even_cluster
from topology import OVERSUBSCRIPTION, why_not
from train import Rounds, machine, publish, ratio, some_of, summary

RESULTS = Path(__file__).parent / "results" / "hosts.json"
SECTIONS = ("steps", "p2p", "tls")
CELLS = ("2@10", "2@1", "2@0.2", "4@10", "4@1", "4@0.2", "blocks@1", "interleaved@1")
ORDERS: dict[str, Order] = {"blocks": "blocks", "interleaved": "interleaved"}
STEPS = {"10": 16, "1": 12, "0.2": 8}  # on the clock, by Gbit/s: slow ones need fewer
WARM_UP = 13  # steps, for everyone: until Shoal has tried whether overlap pays
PEER, OURS, INT8, DDP_ON_SHOAL, PLAINTEXT = "ddp on gloo", "shoal", "shoal int8@rack", "ddp on shoal", "without tls"

# The targets, as ratios of speeds to the peer's
TARGETS = {OURS: 1.0, INT8: 2.0, DDP_ON_SHOAL: 1.0}
RACK_TARGET = 1.3  # of what is exact, where racks matter
TLS_TARGET = 0.9  # of the speed without
LARGE_BYTES, LARGE_TARGET, SMALL_TARGET = 64 << 10, 1.0, 1 / 1.5  # of messages: times of gloo over ours

TLS_CELL = "2@1"
P2P_LINK = "10 Gbit/s"
P2P_SIZES = tuple(64 * 4**power for power in range(10))  # 64 B to 16 MB
QUICK_P2P_SIZES = (64, 64 << 10)

Contender = Callable[[cases.Case, Lab], Measured]


# -- steps ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Cell:
    """`2@10`: two hosts at one switch, links of 10 Gbit/s. `blocks@1`: two racks of two hosts, uplinks 1:4."""

    name: str

    @property
    def where(self) -> str:
        return self.name.partition("@")[0]

    @property
    def rate(self) -> str:
        return self.name.partition("@")[2]

    @property
    def racks(self) -> bool:
        return self.where in ORDERS

    @property
    def hosts(self) -> int:
        return 4 if self.racks else int(self.where)

    @property
    def cluster(self) -> Cluster:
        link = f"{self.rate} Gbit/s"
        if self.racks:
            return even_cluster(racks=2, hosts=2, link=link, oversubscription=OVERSUBSCRIPTION)
        return even_cluster(racks=1, hosts=self.hosts, link=link)

    @property
    def title(self) -> str:
        shape = f"racks 1:{OVERSUBSCRIPTION}, {self.where}" if self.racks else f"{self.hosts} hosts"
        return f"{shape}, {self.rate} Gbit/s"

    def lab(self) -> Lab:
        return Lab(self.cluster, order=ORDERS.get(self.where, "blocks"))

    def target(self, contender: str) -> float | None:
        exact = contender in (OURS, DDP_ON_SHOAL)
        return RACK_TARGET if self.racks and exact else TARGETS.get(contender)


def _ddp(backend: str) -> Contender:
    return lambda case, lab: ddp(case, backend, lab.rank_hosts())


def _shoal(**settings: Any) -> Contender:
    def run(case: cases.Case, lab: Lab) -> Measured:
        hosts = lab.cluster.workers  # a lane each: the closest to what DDP does
        return shoal_with(case, workers=hosts, lanes=hosts, launcher=lab.launcher, **settings)

    return run


def contenders(cell: Cell) -> dict[str, Contender]:
    found = {PEER: _ddp("gloo"), OURS: _shoal(), DDP_ON_SHOAL: _ddp("shoal")}
    return found | ({INT8: _shoal(compress="int8@rack")} if cell.racks else {})


def steps(cell: Cell, case: cases.Case, rounds: int) -> dict[str, Any]:
    return _compared(cell, case, contenders(cell), rounds, PEER)


def _compared(cell: Cell, case: cases.Case, who: Mapping[str, Contender], rounds: int, peer: str) -> dict[str, Any]:
    """Speeds in interleaved rounds, and their ratios to the peer's. Who fails once is left out, with the reason."""
    found: Rounds = {name: [] for name in who}
    failed: dict[str, str] = {}
    with cell.lab() as lab:
        for number, name in in_turns(list(who), rounds):
            if name in failed:
                continue
            try:
                measured = who[name](case, lab)
            except (ShoalError, RuntimeError) as error:
                failed[name] = str(error).splitlines()[0]
                print(f"{cell.title}  {name}: {failed[name]}", file=sys.stderr, flush=True)
                continue
            found[name].append(measured)
            shown = f"{_step_ms(case, measured.samples_per_second):9.1f} ms a step"
            print(f"{cell.title}  round {number + 1} of {rounds}  {name:16}{shown}", file=sys.stderr, flush=True)
    whole = {name: each for name, each in found.items() if name not in failed}
    ratios = {name: (name, peer) for name in whole if name != peer and peer in whole}
    targets = {name: cell.target(name) for name in ratios}
    return {
        "cell": cell.name,
        "title": cell.title,
        "hosts": cell.hosts,
        "failed": failed,
        "targets": targets,
    } | summary(case, whole, ratios)


def _step_ms(case: cases.Case, samples_per_second: float) -> float:
    return 1000 * case.batch / samples_per_second


# -- messages ---------------------------------------------------------------------------------------------------------


def p2p(sizes: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """There and back between two hosts, both backends in the same processes and in turns."""
    with Lab(even_cluster(racks=1, hosts=2, link=P2P_LINK)) as lab, scratch_folder() as folder:
        forked(2, lambda rank: _messages(rank, folder / "rows", sizes, rounds), lab.rank_hosts())
        rows = msgspec.json.decode((folder / "rows").read_bytes(), type=list[Row])
    return [_message_row(row) for row in rows]


def _messages(rank: int, note: Path, sizes: Sequence[int], rounds: int) -> None:
    dist.init_process_group("gloo")
    groups = {backend: dist.new_group(backend=backend) for backend in BACKENDS}
    rows = []
    for num_bytes in sizes:
        calls = {backend: COLLECTIVES["ping-pong"](num_bytes, rank, 2, group) for backend, group in groups.items()}
        rows.append(Row(collective="ping-pong", num_bytes=num_bytes, seconds=interleaved(calls, rounds)))
    if rank == 0:
        note.write_bytes(msgspec.json.encode(rows))
    dist.barrier()
    dist.destroy_process_group()


def _message_row(row: Row) -> dict[str, Any]:
    one_way = {name: [each / 2 for each in seconds] for name, seconds in row.seconds.items()}
    speeds = {name: [row.num_bytes / each for each in seconds] for name, seconds in one_way.items()}
    return {
        "bytes": row.num_bytes,
        "seconds": one_way,
        "best_bytes_per_second": {name: max(each) for name, each in speeds.items()},
        "gloo / shoal": ratio(speeds["shoal"], speeds["gloo"]),
        "target": LARGE_TARGET if row.num_bytes >= LARGE_BYTES else SMALL_TARGET,
    }


# -- encryption -------------------------------------------------------------------------------------------------------


def tls(case: cases.Case, rounds: int) -> dict[str, Any]:
    def without(case: cases.Case, lab: Lab) -> Measured:
        with _plaintext():
            return _shoal()(case, lab)

    cell = Cell(TLS_CELL)
    found = _compared(cell, case, {PLAINTEXT: without, OURS: _shoal()}, rounds, PLAINTEXT)
    return found | {"targets": {OURS: TLS_TARGET}}


@contextmanager
def _plaintext() -> Iterator[None]:
    """Leaves TLS out between ranks that are forked in this block. The product has no switch for that."""
    secured = connect_peers.secure
    connect_peers.secure = lambda connection, credentials, **how: secured(connection, None, **how)
    try:
        yield
    finally:
        connect_peers.secure = secured


# -- the whole --------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if reason := why_not():
        print(f"skipped: {reason}", file=sys.stderr)
        return 3
    torch.set_num_threads(1)
    began, rounds = time.monotonic(), options.rounds or (1 if options.quick else 5)
    result: dict[str, Any] = {"machine": machine(), "quick": options.quick, "case": options.case, "rounds": rounds}
    if "steps" in options.section:
        result["steps"] = [steps(cell, _case(options, cell), rounds) for cell in options.only]
    if "p2p" in options.section:
        result["p2p"] = p2p(QUICK_P2P_SIZES if options.quick else P2P_SIZES, rounds)
    if "tls" in options.section:
        result["tls"] = tls(_case(options, Cell(TLS_CELL)), rounds)
    result |= {"seconds": round(time.monotonic() - began, 1), "load_after": os.getloadavg()[0]}
    publish(result, text(result), options.json)
    return 0


def _case(options: argparse.Namespace, cell: Cell) -> cases.Case:
    case = cases.make(options.case, options.quick)
    return case if options.quick else dataclasses.replace(case, steps=STEPS.get(cell.rate, case.steps), warm_up=WARM_UP)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Training between the hosts of a lab, beside DDP on gloo")
    sections = ",".join(SECTIONS)
    parser.add_argument("--section", type=some_of(SECTIONS), default=list(SECTIONS), help=f"of {sections}")
    parser.add_argument("--only", type=_cells, default=list(map(Cell, CELLS)), help=f"of {','.join(CELLS)}")
    known = [*cases.CASES, *cases.OTHERS]
    parser.add_argument("--case", choices=known, default="wide", help="what is trained (wide: 1.6 M parameters)")
    parser.add_argument("--rounds", type=int, default=None, help="5; with --quick 1")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it works, not how fast it is")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the numbers go")
    return parser


def _cells(text: str) -> list[Cell]:
    """Other rates and numbers of hosts work, too: 3@2.5, blocks@0.2."""
    found = [Cell(name) for name in text.split(",")]
    for cell in found:
        try:
            good = (cell.racks or int(cell.where) > 1) and float(cell.rate) > 0
        except ValueError:
            good = False
        if not good:
            raise argparse.ArgumentTypeError(f"there is no cell {cell.name}; there are {', '.join(CELLS)}")
    return found


# -- on the screen ----------------------------------------------------------------------------------------------------


def text(result: dict[str, Any]) -> str:
    lines: list[str] = []
    if found := result.get("steps"):
        lines += [
            f"{result['case']}: {found[0]['parameters']:,} parameters, batch {found[0]['batch']},"
            f" a worker on each host, one thread each; rounds: {result['rounds']}",
            *_step_lines(found),
        ]
    if "p2p" in result:
        lines += ["", *_p2p_lines(result["p2p"])]
    if encrypted := result.get("tls"):
        lines += ["", "tls", *_step_lines([encrypted])]
    return "\n".join(lines)


def _step_lines(cells: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        f"{'':36}{'':16}{'ms a step':>16}   ratio of speeds",
        f"{'':36}{'':16}{'best':>8}{'median':>8}{'best':>8}{'median':>8}   {'in one round':16}{'target':>7}",
    ]
    for cell in cells:
        title = cell["title"]
        for name, row in cell["contenders"].items():
            best, median = (1000 * cell["batch"] / row[which] for which in ("best", "median"))
            line = f"{title:36}{name:16}{best:8.1f}{median:8.1f}"
            if found := cell["ratios"].get(name):
                line += f"{found['best']:8.2f}{found['median']:8.2f}   {_range(found):16}"
                line += _verdict(cell["targets"][name], found["median"])
            lines.append(line.rstrip())
            title = ""
        lines += [f"{'':36}{name:16} failed: {reason}" for name, reason in cell["failed"].items()]
    return lines


def _p2p_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        f"messages between two hosts, {P2P_LINK}, there and back; half of it, best",
        f"{'':10}{'gloo':>24}{'shoal':>24}   times of gloo over ours",
        f"{'':10}{'':24}{'':24}{'best':>8}{'median':>8}   {'in one round':16}{'target':>7}",
    ]
    for row in rows:
        line = f"{readable_bytes(row['bytes']):10}"
        for name in BACKENDS:
            gigabits = 8 * row["best_bytes_per_second"][name] / 1e9
            line += f"{shown_time(min(row['seconds'][name])):>12}{gigabits:5.2f} Gbit/s"
        found = row["gloo / shoal"]
        line += f"{found['best']:8.2f}{found['median']:8.2f}   {_range(found):16}"
        lines.append(line + _verdict(row["target"], found["median"]))
    return lines


def _range(found: Mapping[str, float]) -> str:
    return f"{found['lowest']:.2f} to {found['highest']:.2f}"


def _verdict(target: float | None, found: float) -> str:
    return "" if target is None else f"{target:7.2f}  {'reached' if found >= target else 'missed'}"


if __name__ == "__main__":
    sys.exit(main())
