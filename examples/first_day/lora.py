"""Low-rank adapters on a frozen model: only they have gradients, travel between workers and get optimizer state.

shoal run examples/first_day/lora.py --workers 2
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal


class LowRank(nn.Module):
    """A frozen linear layer, and what two thin matrices add to it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.base(x) + self.up(self.down(x))
        return added


torch.manual_seed(0)
x = torch.randn(512, 16)
y = (x[:, :3].sum(1) > 0).long()
loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)

model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))  # as if it were trained
before = model[0].weight.clone()
model[0], model[3] = LowRank(model[0], 4), LowRank(model[3], 4)
adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(adapters, lr=1e-2)

run = shoal.join(model, optimizer, loader)
for _ in run.epochs(5):
    for batch in run.batches():
        loss = run.backward(batch, lambda b: F.cross_entropy(model(b[0]), b[1]))
        optimizer.step()
if run.leader:
    share = sum(map(torch.numel, adapters)) / sum(map(torch.numel, model.parameters()))
    frozen = "unchanged" if torch.equal(before, model[0].base.weight) else "changed"
    print(f"loss {loss!r}; {share:.0%} of the parameters trained, the rest {frozen}")
