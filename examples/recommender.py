"""A two-tower recommender whose tables live on servers.

    shoal train examples/recommender.py --workers 2 --servers 2 --sync async

People and items are made up, with tastes that are known: what a model could reach at best is known, too (`best`). A
person is shown two items and clicks on one. Who comes and what is shown follow power laws, so a few rows are asked for
all the time and most of them hardly ever: a batch touches a small part of the tables, and only that part travels.

The report shows the AUC: how often the clicked item is scored above the other one. Chance is 0.5. SHOAL_STEPS,
SHOAL_BATCH, SHOAL_PEOPLE, SHOAL_ITEMS and SHOAL_CLICKS change the size.
"""

import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal


def size(name: str, default: int) -> int:
    return int(os.environ.get(f"SHOAL_{name}", default))


STEPS, BATCH = size("STEPS", 400), size("BATCH", 512)
PEOPLE, ITEMS, CLICKS = size("PEOPLE", 500), size("ITEMS", 20_000), size("CLICKS", 204_800)
HELD_OUT = 4096
TASTES, WIDTH = 4, 8  # numbers that decide what a person likes, and numbers that the model has to say it with


def power_law(number: int, exponent: float) -> Tensor:
    return torch.arange(1, number + 1, dtype=torch.float64) ** -exponent


def clicks(number: int) -> tuple[Tensor, Tensor, Tensor, float]:
    """Who was shown which two items, which one was clicked, and how often that was the one that the person likes more:
    the AUC of someone who knows everything but the moment's mood."""
    generator = torch.Generator().manual_seed(1)

    def drawn(weights: Tensor, *shape: int) -> Tensor:
        count = torch.Size(shape).numel()
        return torch.multinomial(weights, count, replacement=True, generator=generator).view(shape)

    likes = torch.randn(PEOPLE, TASTES, generator=generator)
    offers = torch.randn(ITEMS, TASTES, generator=generator)
    person = drawn(power_law(PEOPLE, 0.8), number)
    shown = drawn(power_law(ITEMS, 1.1), number, 2)
    appeal = torch.einsum("nt,nit->ni", likes[person], offers[shown])
    mood = torch.rand(number, generator=generator)
    clicked = (mood < torch.sigmoid(appeal[:, 1] - appeal[:, 0])).long()
    return person, shown, clicked, (appeal.argmax(dim=1) == clicked).double().mean().item()


class Towers(nn.Module):
    """One tower makes a vector of a person, the other of an item; their product is the score."""

    def __init__(self) -> None:
        super().__init__()
        self.people = shoal.Embedding(PEOPLE, WIDTH, ids=lambda batch: batch[0], scale=0.1, lr=0.4)
        self.items = shoal.Embedding(ITEMS, WIDTH, ids=lambda batch: batch[1], scale=0.1, lr=0.4)
        self.person_tower = nn.Linear(WIDTH, WIDTH)
        self.item_tower = nn.Linear(WIDTH, WIDTH)
        nn.init.eye_(self.person_tower.weight)
        nn.init.eye_(self.item_tower.weight)

    def forward(self, person: Tensor, shown: Tensor) -> Tensor:
        wants, offers = self.person_tower(self.people(person)), self.item_tower(self.items(shown))
        scores: Tensor = (wants.unsqueeze(1) * offers).sum(-1)
        return scores


def auc(scores: Tensor, clicked: Tensor) -> Tensor:
    """The share of pairs in which the clicked item has the higher score; a draw is half a hit."""
    ours, other = (scores.gather(1, each.unsqueeze(1)) for each in (clicked, 1 - clicked))
    return ((ours > other).double() + 0.5 * (ours == other).double()).mean()


person, shown, clicked, best = clicks(CLICKS + HELD_OUT)

job = shoal.Job(
    name="recommender",
    model=Towers,
    data=(person[HELD_OUT:], shown[HELD_OUT:], clicked[HELD_OUT:]),
    loss=F.cross_entropy,
    optimizer=lambda named: torch.optim.Adam(named, lr=1e-3),  # of the towers; tables have their own
    batch=BATCH,
    lanes=2,
    steps=STEPS,
    evaluate=(person[:HELD_OUT], shown[:HELD_OUT], clicked[:HELD_OUT]),
    evaluate_every=max(1, STEPS // 4),
    metrics={"auc": auc},
)
