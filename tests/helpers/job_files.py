"""Text of job files and scripts that several tests write."""

# Steps of at least 20 ms, whatever the machine: faults come while a step is under way.
JOB = """\
import time

import shoal
import torch
from torch import nn

generator = torch.Generator().manual_seed(1)


def loss(output, target):
    time.sleep(0.005)
    return nn.functional.cross_entropy(output, target)


job = shoal.Job(
    model=lambda: nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3)),
    data=(torch.randn(160, 8, generator=generator), torch.randint(3, (160,), generator=generator)),
    loss=loss,
    optimizer=lambda named: torch.optim.AdamW(named, lr=0.01),
    batch=16,
    epochs=2,
)
"""


LAYERS = """
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        {inside}
        return self.inner(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("width", torch.tensor(1))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        {own}
        return self.head(x)
"""


LOOP = """\
import shoal
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x, y = torch.randn(64, 6), torch.randint(3, (64,))
model = nn.Sequential(nn.Linear(6, 100), nn.ReLU(), nn.BatchNorm1d(100), nn.Linear(100, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
run = shoal.join(model, optimizer, DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True))
for epoch in run.epochs(2):
    for batch in run.batches():
        run.backward(batch, lambda b: F.cross_entropy(model(b[0]), b[1]))
        optimizer.step()
        optimizer.zero_grad()
told = run.traffic
compressed = told.sent_bytes != told.uncompressed_bytes
print(told.transport, "exact" if told.exact else "not exact", told.compressors, compressed, flush=True)
"""
