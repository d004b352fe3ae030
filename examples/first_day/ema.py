"""A loop of one's own with a moving average of the weights, which is saved and resumed with the run.

shoal run examples/first_day/ema.py --workers 2
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import shoal

torch.manual_seed(0)
x = torch.randn(512, 8)
y = (x[:, :2].prod(1) > 0).long()
loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95), use_buffers=True)

run = shoal.join(model, optimizer, loader, state={"average": average})
for _ in run.epochs(5):
    for batch in run.batches():
        run.backward(batch, lambda b: F.cross_entropy(model(b[0]), b[1]))
        optimizer.step()
        average.update_parameters(model)


def hits(network: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (network(batch[0]).argmax(1) == batch[1]).float().mean()


average.eval()
found = {
    "model": run.evaluate((x, y), lambda b: hits(model, b)),
    "average": run.evaluate((x, y), lambda b: hits(average, b)),
}
if run.leader:
    total = sum(each.double().sum().item() for each in average.parameters())
    print(f"accuracy {found}; average {total!r} of {int(average.n_averaged)} updates")
