"""Words as vectors, learned from the words around them (skip-gram with negative sampling); both tables live on servers.

    shoal train examples/skipgram.py --workers 2 --servers 2 --sync async
    python examples/skipgram.py                       the same, and then shows which words ended up close to each other

It reads the language reference that comes with Python (what `help("class")` prints), so there is nothing to download.
SHOAL_DATA=folder reads the folder's *.txt files instead. Every tenth paragraph is held out: of those the report shows
how often a word's real neighbour is scored above a neighbour of some other word. Guessing gives 0.5, and so does
knowing how frequent words are, because both are neighbours somewhere. SHOAL_STEPS, SHOAL_BATCH and SHOAL_WIDTH change
the size.
"""

import os
import re
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal


def size(name: str, default: int) -> int:
    return int(os.environ.get(f"SHOAL_{name}", default))


STEPS, BATCH, WIDTH = size("STEPS", 640), size("BATCH", 512), size("WIDTH", 32)
WINDOW, NEGATIVES = 4, 5
RARE = 5  # words with fewer occurrences are left out
FREQUENT = 1e-3  # words with a larger share of the text are left out here and there
HELD_OUT = 10  # every tenth paragraph


def read_paragraphs() -> list[list[str]]:
    """Each once: the reference repeats some of them."""
    folder = os.environ.get("SHOAL_DATA")
    if folder:
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in sorted(Path(folder).glob("*.txt"))]
    else:
        from pydoc_data.topics import topics

        texts = [topics[name] for name in sorted(topics)]
    found = dict.fromkeys(part for text in texts for part in text.lower().split("\n\n"))
    paragraphs = [re.findall(r"[^\W\d_]{2,}", part) for part in found]
    words = sum(map(len, paragraphs))
    if words < 1000 or len(paragraphs) < 2 * HELD_OUT:
        raise shoal.InputError(
            f"{len(texts)} texts with {words:,} words in {len(paragraphs):,} paragraphs; at least 1,000 words in"
            f" {2 * HELD_OUT} paragraphs are needed",
            fix="more text in the *.txt files of SHOAL_DATA, with an empty line between paragraphs",
        )
    return paragraphs


class Corpus:
    """Pairs of neighbours, in both directions, that stand in one paragraph and not more than a window apart."""

    def __init__(self, paragraphs: list[list[str]]) -> None:
        counted = Counter(word for paragraph in paragraphs for word in paragraph)
        self.words = [word for word, count in counted.most_common() if count >= RARE]
        self.numbers = {word: number for number, word in enumerate(self.words)}
        self.counts = torch.tensor([counted[word] for word in self.words], dtype=torch.float64)
        self.generator = torch.Generator().manual_seed(1)
        known = [[self.numbers[word] for word in paragraph if word in self.numbers] for paragraph in paragraphs]
        text = torch.tensor([number for paragraph in known for number in paragraph])
        where = torch.tensor([place for place, paragraph in enumerate(known) for _ in paragraph])
        kept = torch.rand(len(text), generator=self.generator) < (FREQUENT * len(text) / self.counts[text]).sqrt()
        self.text, self.where = text[kept], where[kept]

    def pairs(self, held_out: bool) -> tuple[Tensor, Tensor]:
        chosen = (self.where % HELD_OUT == 0) == held_out
        text, where = self.text[chosen], self.where[chosen]
        found = []
        for apart in range(1, WINDOW + 1):
            together = where[apart:] == where[:-apart]
            left, right = text[:-apart][together], text[apart:][together]
            found += [torch.stack([left, right]), torch.stack([right, left])]
        centre, neighbour = torch.cat(found, dim=1)
        return centre, neighbour

    def training(self) -> tuple[Tensor, Tensor, Tensor]:
        """A word; a neighbour and words that happen to be drawn; which of these is the neighbour."""
        centre, neighbour = self.pairs(held_out=False)
        number = len(centre) * NEGATIVES
        drawn = torch.multinomial(self.counts**0.75, number, replacement=True, generator=self.generator)
        around = torch.cat([neighbour.unsqueeze(1), drawn.view(-1, NEGATIVES)], dim=1)
        return centre, around, _first_is_right(around)

    def validation(self) -> tuple[Tensor, Tensor, Tensor]:
        """A word; its neighbour and a neighbour of another; which of these is its own."""
        centre, neighbour = self.pairs(held_out=True)
        order = torch.randperm(len(centre), generator=self.generator)
        around = torch.stack([neighbour, neighbour[order]], dim=1)[:8192]
        return centre[:8192], around, _first_is_right(around)


def _first_is_right(around: Tensor) -> Tensor:
    return F.one_hot(torch.zeros(len(around), dtype=torch.int64), around.shape[1]).float()


class SkipGram(nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.words = shoal.Embedding(words, WIDTH, ids=lambda batch: batch[0], scale=0.1, lr=0.2)
        self.contexts = shoal.Embedding(words, WIDTH, ids=lambda batch: batch[1], scale=0.0, lr=0.2)
        self.offset = nn.Parameter(torch.zeros(()))

    def forward(self, centre: Tensor, around: Tensor) -> Tensor:
        scores: Tensor = (self.words(centre).unsqueeze(1) * self.contexts(around)).sum(-1) + self.offset
        return scores


def loss(scores: Tensor, right: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(scores, right, reduction="none").sum(1).mean()


def neighbours(scores: Tensor, right: Tensor) -> Tensor:
    """How often the right one is scored above the other; a draw is half a hit."""
    ours, other = scores[:, 0], scores[:, 1]
    return ((ours > other).double() + 0.5 * (ours == other).double()).mean()


def nearest(model: nn.Module, word: str, number: int = 5) -> list[str]:
    """Words whose vectors point in the same direction."""
    assert isinstance(model, SkipGram)
    with torch.no_grad():
        vectors = F.normalize(model.words(torch.arange(len(corpus.words))), dim=1)
    close = (vectors @ vectors[corpus.numbers[word]]).topk(number + 1).indices.tolist()
    return [corpus.words[other] for other in close if corpus.words[other] != word][:number]


corpus = Corpus(read_paragraphs())

job = shoal.Job(
    name="skipgram",
    model=lambda: SkipGram(len(corpus.words)),
    data=corpus.training(),
    loss=loss,
    optimizer=lambda named: torch.optim.SGD(named, lr=0.1),  # of the offset; tables have their own
    batch=BATCH,
    lanes=2,
    steps=STEPS,
    evaluate=corpus.validation(),
    evaluate_every=max(1, STEPS // 4),
    metrics={"neighbours": neighbours},
)

if __name__ == "__main__":
    report = shoal.train(job, workers=2, servers=2, sync="async")
    asked = [word for word in ("class", "exception", "string", "integer", "import", "loop") if word in corpus.numbers]
    trained = report.model()
    for word in asked or corpus.words[20:26]:
        print(f"{word:>12}   {', '.join(nearest(trained, word))}")
