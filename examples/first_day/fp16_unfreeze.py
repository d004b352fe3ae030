"""Fine-tuning as people write it: fp16 with a loss scale, no decay for norms and biases, an encoder that thaws later.

shoal train examples/first_day/fp16_unfreeze.py --workers 2
shoal verify examples/first_day/fp16_unfreeze.py --workers 1,2 --steps 12
"""

import torch
from torch import Tensor, nn

import shoal

CLASSES, WIDTH, UNFREEZE_AT = 4, 32, 10

generator = torch.Generator().manual_seed(0)
x = torch.randn(480, 12, generator=generator)
y = (x[:, :CLASSES] + 0.3 * torch.randn(480, CLASSES, generator=generator)).argmax(1)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Dropout(0.1))
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, CLASSES))

    def forward(self, features: Tensor) -> Tensor:
        scores: Tensor = self.head(self.encoder(features))
        return scores


def optimizer(model: nn.Module, named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Only the matrices of linear layers decay: the type of a module says so, not its name."""
    matrices = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    decayed = [parameter for _, parameter in named if id(parameter) in matrices]
    others = [parameter for _, parameter in named if id(parameter) not in matrices]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2)


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(dim=1) == target).float().mean()


job = shoal.Job(
    name="fp16-unfreeze",
    model=Classifier,
    data=(x[:400], y[:400]),
    evaluate=(x[400:], y[400:]),
    metrics={"accuracy": accuracy},
    loss=nn.functional.cross_entropy,
    optimizer=optimizer,
    scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60),
    batch=32,
    epochs=5,
    accumulate={0: 1, 3: 2},  # from the fourth pass on, two batches are one update
    precision="fp16",
    loss_scale=shoal.LossScale(init_scale=2**22, growth_interval=20),  # too large on purpose: a few updates are skipped
    freeze={"encoder": UNFREEZE_AT},
    clip_norm=1.0,
)
