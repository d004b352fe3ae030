"""A replica group of torchft: one process, DDP over Gloo, as in torchft's example. In an environment of its own
(README.md); started, and started again after a kill, by kills.py.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

import cases
from notes import COMMITTED, DROPPED, STARTED, Notebook


def main(name: str, folder: Path, worker: int, size: int, quick: bool) -> None:
    book = Notebook(folder, worker)
    book.write(STARTED, pid=os.getpid())
    torch.set_num_threads(1)
    case = cases.make(name, quick)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def save() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=save,
        replica_id=f"replica_{worker}",
        timeout=timedelta(seconds=30),
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        hostname="127.0.0.1",
    )
    model = DistributedDataParallel(manager, case.model)
    optimizer = Optimizer(manager, case.optimizer(model.parameters()))
    while True:
        step = manager.current_step()
        inputs, target = case.share(step, worker, size)
        optimizer.zero_grad()
        case.loss(model(inputs), target).backward()
        optimizer.step()
        taking_part, group = manager.num_participants(), manager._quorum_id  # it has no public name
        kind = COMMITTED if manager.current_step() > step else DROPPED
        book.write(kind, step=manager.current_step(), group=group, members=taking_part)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5] == "quick")
