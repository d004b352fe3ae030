"""A training loop of your own, with the five lines that Shoal needs marked.

    python examples/own_loop.py                        one process, as ever
    shoal run examples/own_loop.py --workers 2         the same bits, sooner

Both print the same final loss, to the last digit.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal  # ◄ 1


def spirals(points: int, seed: int) -> TensorDataset:
    """Points on three arms of a spiral, and which arm each is on."""
    generator = torch.Generator().manual_seed(seed)
    arm = torch.randint(3, (points,), generator=generator)
    radius = torch.rand(points, generator=generator)
    angle = 4 * radius + 2.1 * arm + 0.2 * torch.randn(points, generator=generator)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), arm)


def hits(batch: list[Tensor]) -> Tensor:
    found: Tensor = model(batch[0]).argmax(dim=1)
    return (found == batch[1]).float().mean()


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(spirals(2048, seed=1), batch_size=256, shuffle=True)  # of all workers together
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=20 * len(loader))

run = shoal.join(model, optimizer, loader, scheduler=scheduler)  # ◄ 2
for epoch in run.epochs(20):  # ◄ 3
    for batch in run.batches():  # ◄ 4
        loss = run.backward(batch, lambda b: F.cross_entropy(model(b[0]), b[1]))  # ◄ 5
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    if epoch % 5 == 4:
        accuracy = run.evaluate(spirals(512, seed=2), hits)  # every worker does a share
        if run.leader:
            print(f"epoch {epoch + 1:2}  loss {loss:.4f}  accuracy {accuracy:.3f}")

if run.leader:
    print(f"final loss {loss!r}")
