"""kill -9 in the middle of training, and the same weights at the end.

python examples/survive.py
"""

import os
import signal
import tempfile
from pathlib import Path

import torch
from torch import nn

import shoal


def job(killer: Path | None) -> shoal.Job:
    """A small classifier. Whoever first finds the file `killer` in the middle of a step dies by it."""

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if killer is not None and os.environ["RANK"] == "1" and calls.pop() == 30:
            try:
                killer.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            except FileNotFoundError:
                pass
        return nn.functional.cross_entropy(output, target)

    calls = list(range(10_000, -1, -1))
    x = torch.randn(512, 16, generator=torch.Generator().manual_seed(0))
    return shoal.Job(
        model=lambda: nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2)),
        data=(x, (x.sum(1) > 0).long()),
        loss=loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=3e-3),
        batch=64,
        epochs=6,
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        killer = Path(folder) / "killer"
        killer.touch()
        calm = shoal.train(job(None), workers=3, run_dir=f"{folder}/calm", quiet=True)
        hurt = shoal.train(job(killer), workers=3, run_dir=f"{folder}/hurt", quiet=True)
    for fault in hurt.value["incidents"]:
        print(f"worker {fault['worker']}: {fault['detected_by']}; next commit after {fault['seconds']:.2f} s")
    print("undisturbed      ", calm.weights_sha256)
    print("one worker killed", hurt.weights_sha256)
    if calm.weights_sha256 != hurt.weights_sha256 or killer.exists():
        raise SystemExit("they differ")
