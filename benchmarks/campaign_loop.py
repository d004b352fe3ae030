"""The job of the kill campaign as a loop of the user's own, for `shoal run`."""

import torch
from torch.utils.data import DataLoader, TensorDataset

import shoal
from campaign_job import BATCH, labels, net, padded_loss, pulsed, samples

torch.manual_seed(0)
model = net()
optimizer = pulsed(torch.optim.AdamW(model.parameters(), lr=1e-2))
loader = DataLoader(TensorDataset(samples, labels), batch_size=BATCH, shuffle=True)

run = shoal.join(model, optimizer, loader)
for _ in run.epochs(1):
    for batch in run.batches():
        run.backward(batch, lambda part: padded_loss(model(part[0]), part[1]))
        optimizer.step()
        optimizer.zero_grad()
