"""Every compressor on this machine:   python benchmarks/compressors.py

Bytes, error and speed on the gradients of a small network, one thread, kernels as in a worker. A copy of the same
tensor is timed in the same rounds. Prints a table and writes benchmarks/results/compressors.json. Seconds.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from shoal.collectives.compression import CompressionStats, Compressor, parse_compressor
from shoal.numerics.kernels import configure
from train import machine

RESULTS = Path(__file__).parent / "results" / "compressors.json"
WORDS = [
    "fp16",
    "bf16",
    "int8",
    "int8+feedback",
    "int4-feedback",
    "int4",
    "topk:0.01-feedback",
    "topk:0.01",
    "onebit-feedback",
    "onebit",
    "powersgd:4-feedback",
    "powersgd:4",
]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="bytes, error and speed of every compressor on this machine")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it works, not how fast it is")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the numbers go")
    options = parser.parse_args(arguments)
    before = machine()
    configure(threads=1)
    count, steps, rounds = (1 << 14, 5, 2) if options.quick else (1 << 20, 60, 40)
    stream = list(gradients(count, steps))
    result = {
        "machine": before,
        "quick": options.quick,
        "elements": count,
        "steps": steps,
        "rounds": rounds,
        "compressors": {word: errors(parse_compressor(word), stream) for word in WORDS},
    }
    copy = speeds(stream[-1], rounds, result["compressors"])
    result["copy_gb_per_second"] = copy
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    print(text(result))
    print(f"numbers: {options.json}")
    return 0


def gradients(count: int, steps: int) -> Iterator[Tensor]:
    """What data parallelism would send: flat gradients of neighbouring steps of a classifier, cut to `count`."""
    torch.manual_seed(0)
    width = 32 * max(1, round((count / 1024) ** 0.5))
    model = nn.Sequential(nn.Linear(256, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    centres = torch.randn(10, 256)
    for _ in range(steps):
        labels = torch.randint(10, (64,))
        loss = nn.functional.cross_entropy(model(centres[labels] + 6 * torch.randn(64, 256)), labels)
        optimizer.zero_grad()
        loss.backward()
        yield torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])[:count].clone()
        optimizer.step()


def errors(compressor: Compressor, stream: Sequence[Tensor]) -> dict[str, Any]:
    """Of single messages, and of their sum over all steps: what a fixed learning rate would make of them."""
    wanted = torch.zeros(stream[0].numel(), dtype=torch.float64)
    got = wanted.clone()
    of_messages = []
    for flat in stream:
        meter = CompressionStats()  # a fresh one looks at its first message
        decoded = compressor.decode(meter.encode(compressor, flat, "gradient"), flat.numel())
        of_messages.append(meter.relative_error)
        wanted += flat
        got += decoded
    return {
        "price": compressor.cost_summary,
        "bytes_per_element": compressor.payload_bytes(stream[0].numel()) / stream[0].numel(),
        "error_of_a_message": statistics.median(of_messages),
        "error_of_the_sum": float((got - wanted).norm() / wanted.norm()),
    }


def speeds(flat: Tensor, rounds: int, rows: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Puts the seconds of encode and decode into the rows, and returns the speed of a plain copy."""
    compressors = {word: parse_compressor(word) for word in rows}
    payloads = {word: each.encode(flat, 0) for word, each in compressors.items()}
    target = torch.empty_like(flat)
    calls: dict[tuple[str, str], Callable[[], object]] = {("copy", ""): lambda: target.copy_(flat)}
    for word, each in compressors.items():
        calls[word, "encode"] = lambda each=each: each.encode(flat, 0)
        calls[word, "decode"] = lambda each=each, word=word: each.decode(payloads[word], flat.numel())
    seconds: dict[tuple[str, str], list[float]] = {name: [] for name in calls}
    for _ in range(rounds):  # each in turn, so that whatever else the machine does falls on all
        for name, call in calls.items():
            call()  # its memory is warm, its code is loaded
            began = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - began)

    def gb_per_second(name: tuple[str, str]) -> dict[str, float]:
        """Of fp32 gradient, however many bytes it becomes."""
        return {
            "best": flat.nbytes / min(seconds[name]) / 1e9,
            "median": flat.nbytes / statistics.median(seconds[name]) / 1e9,
        }

    for word, row in rows.items():
        row["encode_gb_per_second"] = gb_per_second((word, "encode"))
        row["decode_gb_per_second"] = gb_per_second((word, "decode"))
        spent = min(seconds[word, "encode"]) + min(seconds[word, "decode"])
        saved = flat.nbytes - payloads[word].nbytes
        # On a slower link than this, compressing, sending and decompressing takes less time than sending plainly.
        row["pays_below_gbit_per_second"] = 8 * saved / spent / 1e9
    return gb_per_second(("copy", ""))


def text(result: dict[str, Any]) -> str:
    lines = [
        f"{result['elements']:,} elements ({4 * result['elements'] / 2**20:g} MB), one thread;"
        f" a copy runs at {result['copy_gb_per_second']['best']:.1f} GB/s; best of {result['rounds']} rounds",
        f"{'':22}{'bytes per':>10}{'error of':>11}{'error of the':>14}{'encode':>9}{'decode':>9}{'pays below':>13}",
        f"{'':22}{'element':>10}{'a message':>11}"
        f"{'sum of ' + str(result['steps']):>14}{'GB/s':>9}{'GB/s':>9}{'Gbit/s':>13}",
    ]
    for word, row in result["compressors"].items():
        encode, decode = (row[f"{way}_gb_per_second"]["best"] for way in ("encode", "decode"))
        lines.append(
            f"{word:22}{row['bytes_per_element']:10.3f}{row['error_of_a_message']:11.2g}"
            f"{row['error_of_the_sum']:14.2g}{encode:9.1f}{decode:9.1f}{row['pays_below_gbit_per_second']:13.0f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
