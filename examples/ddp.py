"""An ordinary DistributedDataParallel script. Two words make it use Shoal's collectives: the import and the name.

torchrun --nproc-per-node 2 examples/ddp.py
shoal run examples/ddp.py --workers 2
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import shoal  # noqa: F401  registers the backend

dist.init_process_group("shoal")  # was "gloo"
torch.manual_seed(0)
x, y = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(x).float() / 16, torch.tensor(y))
sampler = DistributedSampler(data, seed=0)
loader = DataLoader(data, batch_size=32, sampler=sampler)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for inputs, target in loader:
        loss = nn.functional.cross_entropy(model(inputs), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
total = loss.detach()
dist.all_reduce(total, dist.ReduceOp.AVG)
if dist.get_rank() == 0:
    print(f"{dist.get_world_size()} workers, last loss {total.item():.4f}")
dist.destroy_process_group()
