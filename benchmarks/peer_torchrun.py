"""A worker of `torchrun --max-restarts`: DDP over Gloo, a checkpoint every so many steps, resumed after a restart.

The script that torchrun's documentation asks for. Started and ended by kills.py.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import cases
from notes import COMMITTED, STARTED, Notebook


def main(name: str, folder: Path, every: int, quick: bool) -> None:
    rank, size, restarts = (int(os.environ[key]) for key in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
    book = Notebook(folder, rank)
    book.write(STARTED, pid=os.getpid(), group=restarts)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    case = cases.make(name, quick)
    model = DistributedDataParallel(case.model)
    optimizer = case.optimizer(case.model.parameters())
    checkpoint, step = folder / "checkpoint.pt", 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        case.model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    while True:
        inputs, target = case.share(step, rank, size)
        case.loss(model(inputs), target).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if rank == 0:
            book.write(COMMITTED, step=step, group=restarts, members=size)
            if step % every == 0:
                state = {"model": case.model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, folder / "checkpoint.new")
                os.replace(folder / "checkpoint.new", checkpoint)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "quick")
