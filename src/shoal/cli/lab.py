"""`shoal lab`: a cluster in a box. Runs a command on hosts with slow links between them."""

import argparse
import sys
from pathlib import Path

from shoal.cli.parser import CommandParser
from shoal.driver.launchers.cleanup import clean
from shoal.driver.launchers.lab import Lab
from shoal.driver.launchers.lab_network import picture, summary
from shoal.driver.launchers.programs import check_program, run_program
from shoal.errors import InputError
from shoal.planner.cluster import ORDERS, Cluster, even_cluster, read_cluster

IN_A_LAB = ("train", "run", "verify", "bench", "cluster")  # commands whose workers can run on a lab's hosts
EXAMPLE = ""
EXAMPLES = """\
examples:
  shoal lab --racks 2 --hosts 2 --link "1 Gbit/s" --oversubscription 4
        the picture: racks, hosts, addresses, links
  shoal lab -- verify digits.py --workers 1,2,4
        one sha256 on any number of hosts? (train and run work the same way; --workers: all of the lab's)
  shoal lab --oversubscription 4 -- bench collectives
        how fast the links are, and which algorithm for which size
  shoal lab --hosts 4 --racks 1 -- python train_ddp.py --epochs 3
        any other program: once per worker, with what torchrun sets; the first failure ends the others
  shoal lab clean
        removes what a killed lab has left"""


def arguments(parser: CommandParser) -> None:
    parser.usage, parser.epilog = "shoal lab [options] [-- COMMAND …] | shoal lab clean", EXAMPLES
    parser.add_argument("words", nargs="*", metavar="clean", help="remove what a killed lab has left")
    parser.add_argument("--cluster", type=Path, metavar="FILE", help="a cluster file (TOML), instead of the next five")
    parser.add_argument("--racks", type=int, metavar="N", help="racks (2)")
    parser.add_argument("--hosts", type=int, metavar="N", help="hosts in each rack (2)")
    parser.add_argument("--link", metavar="RATE", help="a host's link to its rack (1 Gbit/s)")
    parser.add_argument("--uplink", metavar="RATE", help="a rack's link to the others (the sum of its hosts' links)")
    parser.add_argument("--oversubscription", type=float, metavar="X", help="or: the sum of its hosts' links over it")
    parser.add_argument("--workers-per-host", type=int, metavar="N", help="processes on each host (1)")
    parser.add_argument("--order", choices=ORDERS, default="blocks", help="ranks host by host, or each on another rack")


def call(given: argparse.Namespace) -> int:
    if given.words == ["clean"]:
        found = clean()
        print(f"removed what was left of {', '.join(found)}" if found else "nothing was left")
        return 0
    if given.words:
        fix = f"shoal lab -- {' '.join(given.words)} …"
        raise InputError(f"the command that runs in the lab comes after --, and {given.words[0]} comes before", fix=fix)
    cluster = _cluster(given)
    words: list[str] = given.script_arguments
    if not words:
        print(picture(cluster))
        return 0
    if words[0] != "shoal" and words[0] not in IN_A_LAB:
        check_program(words[0])
        with Lab(cluster, order=given.order) as lab:
            print(summary(cluster), file=sys.stderr)
            return _run_program(lab, words)
    inner = given.parse(words[1:] if words[0] == "shoal" else words)
    if inner.command not in IN_A_LAB:
        raise InputError(f"shoal {inner.command or ''} has no workers to run in a lab", fix=", ".join(IN_A_LAB))
    with Lab(cluster, order=given.order) as lab:
        print(summary(cluster), file=sys.stderr)
        inner.lab, inner.given = lab, given.given
        result: int = inner.call(inner)
        return result


def _cluster(given: argparse.Namespace) -> Cluster:
    names = ("racks", "hosts", "link", "uplink", "oversubscription")
    flags = {name: getattr(given, name) for name in names if getattr(given, name) is not None}
    workers = given.workers_per_host
    if given.cluster is None:
        return even_cluster(**flags, **({} if workers is None else {"workers": workers}))
    if flags:
        raise InputError(f"--cluster {given.cluster} and --{next(iter(flags))}: both describe the cluster")
    cluster = read_cluster(given.cluster)
    if workers is not None and workers < 1:
        raise InputError(f"--workers-per-host {workers}: at least 1 is needed")
    return cluster if workers is None else cluster.with_workers(workers)


def _run_program(lab: Lab, words: list[str]) -> int:
    try:
        failure = run_program(lab, words)
    except KeyboardInterrupt:
        print("stopped: interrupted; nothing of it still runs", file=sys.stderr)
        return 130
    if failure is None:
        return 0
    print(f"error: {failure}; the others were ended", file=sys.stderr)
    return failure.exit_code
