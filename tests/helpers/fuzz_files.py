"""Parsers of files and of values on the command line, for tests/fuzz."""

import hashlib
import io
import random
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save

from helpers.fuzzing import CORPUS, FuzzTarget, changed_tree, json_bytes, plain
from shoal.cli.report import show_report
from shoal.cli.simulate import _stored_setup
from shoal.collectives.compression.parse import parse_compression
from shoal.collectives.options import parse_links
from shoal.driver.chaos.schedule import make_schedule, read_schedule
from shoal.driver.launch_spec import DRIVER_STATE, read_driver_state
from shoal.errors import CheckpointError, InputError
from shoal.job.settings import parse_setting
from shoal.parallel.layout import ParallelLayout
from shoal.parallel.plan import make_plan, parse_shares, read_plan
from shoal.paramserver.shard import ParameterShard
from shoal.paramserver.snapshot import MANIFEST as SNAPSHOT_MANIFEST
from shoal.paramserver.snapshot import SnapshotFolder
from shoal.paramserver.sync_mode import SyncMode
from shoal.planner.calibration_runs import read_calibration
from shoal.planner.cluster import read_cluster
from shoal.planner.cost.calibrate import Calibration
from shoal.planner.cost.csv_table import predict_table
from shoal.planner.cost.transformer_shape import TransformerShape
from shoal.planner.simulate.stragglers import StragglerModel
from shoal.recovery.checkpoint.export import load_weights
from shoal.recovery.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from shoal.recovery.checkpoint.safetensors_file import SafetensorsFile
from shoal.recovery.membership import sqlite_messages
from shoal.recovery.membership.etcd import parse_address
from shoal.report.compare_runs import read_compared_run
from shoal.report.human import parse_size
from shoal.report.run_folder import RunFolder, _run_line
from shoal.transport.addresses import read_address

STORE_INFO = sqlite_messages.StoreServerInfo(address="127.0.0.1", port=80, pid=7, started=9, token="x")
CLUSTER = """[devices.a]
peak = { bf16 = "312 TFLOP/s", fp32 = "19.5 TFLOP/s" }
memory = "80 GB"
memory_bandwidth = "2039 GB/s"
price = "2.5 USD/h"
[hosts]
device = "a"
devices = 8
[links.inside]
kind = "nvlink"
bandwidth = "300 GB/s"
[links.socket]
sockets = 2
bandwidth = "40 GB/s"
[links.host]
bandwidth = "200 Gbit/s"
cards = 8
latency = "15 us"
efficiency = 0.9
[links.rack]
oversubscription = 4
[[racks]]
count = 2
hosts = 2
[[racks]]
hosts = ["x", "y"]
[[racks]]
[[racks.hosts]]
count = 3
workers = 4
"""
TABLE = """# a comment
layers,hidden,heads,seq,vocab,tp,pp,vp,dp,global_batch,micro_batch,recompute,dtype,zero
24,2304,24,2048,51200,1,2,1,2,16,1,full,fp16,0
30,3072,32,2048,51200,2,1,1,4,32,2,none,bf16,1
"""
FLAGS: dict[str, tuple[Callable[[str], object], tuple[str, ...]]] = {
    "layout": (ParallelLayout.parse, ("data=2,pipeline=2", "tensor=2,zero=1")),
    "shares": (lambda text: parse_shares(text, 2), ("3,1", "0.5,2")),
    "compress": (parse_compression, ("int8@host,powersgd:4@rack", "topk:1%+feedback", "onebit-feedback")),
    "sync": (SyncMode.parse, ("sync", "quorum:0.75", "local:8,outer=nesterov:0.9:0.1", "groups:2", "stale:3")),
    "stragglers": (StragglerModel.parse, ("lognormal:0.1", "slow:2", "constant")),
    "shape": (TransformerShape.parse, ("layers=24,hidden=2304,heads=24,seq=2048,vocab=51200",)),
    "size": (parse_size, ("250MB", "1.5GiB")),
    "setting": (parse_setting, ("steps=50", "clip_norm=0.5", "compile=true")),
    "store_address": (parse_address, ("etcd://user:pass@one:2379,[::1]:2/prefix",)),
    "links": (parse_links, ('{"host": [1e-5, 1e9]}',)),
    "address": (read_address, ("tcp://127.0.0.1:80", "unix:/run/x", "tcp://[::1]:0")),
}


class FileParsers:
    """Each writes a case to a file of its own, and reads it as the product does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder / "run"
        self.run.mkdir()
        self.snapshots = SnapshotFolder(folder / "shard-0")
        self.snapshots.write(ParameterShard().capture())
        self.snapshot = next((folder / "shard-0").glob("snapshot-*"))

    def close(self) -> None:
        self.snapshots.close()

    def file(self, name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
        path = self.folder / name

        def call(data: bytes) -> object:
            path.write_bytes(data)
            return read(path)

        return call

    def in_run(self, name: str, read: Callable[[RunFolder], object]) -> Callable[[bytes], object]:
        def call(data: bytes) -> object:
            (self.run / name).write_bytes(data)
            try:
                return read(RunFolder(self.run))
            finally:
                (self.run / name).unlink()

        return call

    def read_snapshot(self, data: bytes) -> None:
        """A manifest with the right digest, whatever it says."""
        manifest = self.snapshot / SNAPSHOT_MANIFEST
        manifest.write_bytes(hashlib.sha256(data).hexdigest().encode() + b"\n" + data)
        self.snapshots._read(1)

    def snapshot_manifest(self) -> Any:
        if not hasattr(self, "_manifest"):
            _, _, body = (self.snapshot / SNAPSHOT_MANIFEST).read_bytes().partition(b"\n")
            self._manifest = msgspec.json.decode(body)
        return self._manifest


def read_report(folder: RunFolder) -> None:
    _run_line(folder)
    with suppress(InputError), redirect_stdout(io.StringIO()):
        show_report(folder)
    with suppress(InputError):
        read_compared_run(folder)


def read_lines_of_events(folder: RunFolder) -> None:
    folder.read_events()
    _run_line(folder)


def read_tensors(path: Path) -> None:
    with suppress(OSError, ValueError), SafetensorsFile(path) as file:
        for name in file:
            file.read(name)
    load_weights(path)


def tensors_file(chance: random.Random) -> bytes:
    tensors = {"w": torch.zeros(2, 3), "b": torch.zeros(3, dtype=torch.int64), "e": torch.zeros(0, 4)}
    chosen = {name: tensor for name, tensor in tensors.items() if chance.random() < 0.7}
    return save(chosen, {"aliases": '{"v": "w"}'} if chance.random() < 0.5 else None)


def flag(name: str) -> FuzzTarget:
    parse, examples = FLAGS[name]

    def call(data: bytes) -> None:
        parse(data.decode(errors="surrogateescape"))  # as Python hands arguments over

    return FuzzTarget(f"flag_{name}", call, lambda chance: chance.choice(examples), (InputError,), "text")


def targets(folder: Path) -> tuple[list[FuzzTarget], FileParsers]:
    files = FileParsers(folder)

    def text(*examples: str) -> Callable[[random.Random], str]:
        return lambda chance: chance.choice(examples)

    def tree(*values: Any) -> Callable[[random.Random], Any]:
        return lambda chance: plain(chance.choice(values))

    plan = make_plan(lanes=4, workers=2, layout=ParallelLayout(data=2, pipeline=1), compress="int8")
    schedule = make_schedule(seed=1, every=2.0, duration=20.0, kinds=["kill", "stop"], workers=2)
    manifest = msgspec.json.decode(Manifest(format="shoal-checkpoint", version=2, step=7, files={}).encode())
    bad_input = (InputError,)
    found = [
        FuzzTarget(
            "store_json", files.file("store.json", lambda path: sqlite_messages.read_server_info(path.parent)),
            tree(STORE_INFO), (), "json",
        ),
        FuzzTarget("plan", files.file("plan.json", read_plan), tree(plan), bad_input, "json"),
        FuzzTarget("stored_setup", files.file("best.json", _stored_setup), tree({"best": [{"setup": {}}]}),
                   bad_input, "json"),
        FuzzTarget("schedule", files.file("faults.json", read_schedule), tree(schedule), bad_input, "json"),
        FuzzTarget("calibration", files.file("c.json", read_calibration), tree(Calibration()), bad_input, "json"),
        FuzzTarget("config", files.in_run("config.json", RunFolder.check_format), tree(_stored("config/digits.json")),
                   bad_input, "json"),
        FuzzTarget("driver_state", files.in_run(DRIVER_STATE, read_driver_state), tree(_driver_state()), bad_input,
                   "json"),
        FuzzTarget("report", files.in_run("report.json", read_report), tree(_stored("report/digits.json")), (),
                   "json", cost=40),
        FuzzTarget("events_file", files.in_run("events.jsonl", read_lines_of_events), _event_lines, (), cost=4),
        FuzzTarget("manifest", files.file(MANIFEST, lambda path: read_manifest(path.parent)), tree(manifest),
                   (CheckpointError,), "json", seal=_sealed_manifest),
        FuzzTarget("safetensors", files.file("w.safetensors", read_tensors), tensors_file, (CheckpointError,), cost=4),
        FuzzTarget("snapshot", files.read_snapshot, lambda chance: files.snapshot_manifest(), (CheckpointError,),
                   "json", cost=4),
        FuzzTarget("cluster", files.file("c.toml", read_cluster), text(CLUSTER), bad_input, "text", cost=20),
        FuzzTarget("csv", files.file("t.csv", lambda path: predict_table(path, "dgx-a100")), text(TABLE), bad_input,
                   "text", cost=80),
    ]  # fmt: skip
    return [*found, *(flag(name) for name in FLAGS)], files


def _driver_state() -> Any:
    from shoal.report.events import RunStarted
    from shoal.worker.run_config import RunConfig

    started = {field.name: _example(field) for field in msgspec.structs.fields(RunStarted) if field.required}
    return {
        "config": msgspec.to_builtins(RunConfig()),
        "started": {"event": "run-started", "time": 1.0, **started},
        "threads": 1,
        "target": None,
        "resumed": False,
    }


def _example(field: Any) -> Any:
    return {int: 2, str: "data=2", float: 1.0, bool: True}.get(field.type, [])


def _event_lines(chance: random.Random) -> bytes:
    lines = (CORPUS / "events_file" / "digits.jsonl").read_bytes().splitlines()
    changed = [changed_tree(chance, msgspec.json.decode(chance.choice(lines))) for _ in range(chance.randrange(4))]
    return b"\n".join([*lines[: chance.randrange(len(lines))], *map(json_bytes, changed)])


def _stored(name: str) -> Any:
    return msgspec.json.decode((CORPUS / name).read_bytes())


def _sealed_manifest(data: bytes) -> bytes:
    """As the product would have written it, where it can be read at all."""
    with suppress(ValueError, RecursionError):
        return msgspec.json.decode(data, type=Manifest).encode()
    return data
