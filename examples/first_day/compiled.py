"""A compiled model: torch.compile as ever, the same bits on any number of workers.

shoal run examples/first_day/compiled.py --workers 2
shoal run examples/first_day/compiled.py --workers 2 -- inductor     the default backend, which needs a C++ compiler
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal

torch.manual_seed(0)
x = torch.randn(300, 8)
y = (x.square().sum(1) > 8).long()
loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)  # the last batch is a short one
network = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 2))
model = torch.compile(network, backend=sys.argv[1] if sys.argv[1:] else "aot_eager")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

run = shoal.join(model, optimizer, loader)
for _ in run.epochs(3):
    for batch in run.batches():
        loss = run.backward(batch, lambda b: F.cross_entropy(model(b[0]), b[1]))
        optimizer.step()
if run.leader:
    print(f"final loss {loss!r}")
