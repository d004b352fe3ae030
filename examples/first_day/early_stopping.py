"""Early stopping, the best checkpoint, a warm-up, a metric of one's own and averaged weights.

    shoal train examples/first_day/early_stopping.py --workers 2 --log csv

Training ends when the held-out loss has not improved in 3 evaluations: at the same step on any number of workers. The
run's folder then has model.safetensors (the end), best.safetensors (the best accuracy) and ema.safetensors (the mean).
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

import shoal

images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
held_out = torch.arange(len(y)) % 5 == 0


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Dropout(0.1), nn.Linear(96, 10))


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(dim=1) == target).float().mean()


def warm_up(optimizer: torch.optim.Optimizer) -> LRScheduler:
    rise = LinearLR(optimizer, start_factor=0.1, total_iters=20)
    return SequentialLR(optimizer, [rise, CosineAnnealingLR(optimizer, 600)], milestones=[20])


class Watch(shoal.Callback):
    """Runs on the leader alone; what it logs is in metrics.jsonl, the report and every logger."""

    def on_step(self, info: shoal.StepInfo) -> None:
        if info.step % 10 == 0:
            info.log("gradient norm", info.gradient_norm)
            info.log("first layer", info.gradients["0.weight"].abs().max())

    def on_evaluate(self, info: shoal.StepInfo) -> None:
        print(f"step {info.step}: accuracy {info.metrics['accuracy']:.3f}, learning rate {info.learning_rate:.2g}")


job = shoal.Job(
    name="early stopping",
    model=net,
    data=(x[~held_out], y[~held_out]),
    loss=nn.functional.cross_entropy,
    optimizer=lambda named: torch.optim.AdamW(named, lr=0.02),
    scheduler=warm_up,
    batch=64,
    epochs=30,
    evaluate=(x[held_out], y[held_out]),
    metrics={"accuracy": accuracy},
    callbacks=[Watch()],
    patience=3,
    monitor="loss",
    keep_best="accuracy",
    ema=0.99,
)
