"""The examples with parameter servers do what their first lines promise: what needs no process."""

import runpy
from pathlib import Path

import pytest
import torch

import shoal
from helpers.examples import sizes
from helpers.places import EXAMPLES
from shoal.job.load import load_job

# -- recommender ------------------------------------------------------------------------------------------------------


def test_the_recommenders_clicks_follow_tastes_that_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes(monkeypatch, CLICKS=20_000)
    told = runpy.run_path(str(EXAMPLES / "recommender.py"))
    assert 0.75 < told["best"] < 0.9
    scores = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]])
    assert told["auc"](scores, torch.tensor([0, 0, 1])).item() == pytest.approx((1 + 0 + 0.5) / 3)
    counts = told["shown"].flatten().bincount().sort(descending=True).values
    assert counts[:20].sum() > 0.25 * counts.sum(), "few items are shown all the time"
    assert (counts > 0).sum() > 2000, "and many now and then"


# -- skip-gram --------------------------------------------------------------------------------------------------------


def test_skip_grams_keep_paragraphs_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sizes(monkeypatch)
    words = ["".join(chr(97 + digit) for digit in divmod(number, 26)) for number in range(200)]
    # Two words that only occur together, five times over, in paragraphs of their own.
    paragraphs = [f"{left} {right} {n * 'x'} 3 _" for left, right in zip(words[::2], words[1::2], strict=True)
                  for n in range(5)]  # fmt: skip
    (tmp_path / "words.txt").write_text("\n\n".join(paragraphs))
    monkeypatch.setenv("SHOAL_DATA", str(tmp_path))
    corpus = runpy.run_path(str(EXAMPLES / "skipgram.py"))["corpus"]
    centre, neighbour = corpus.pairs(held_out=False)
    pairs = {(corpus.words[a], corpus.words[b]) for a, b in zip(centre.tolist(), neighbour.tolist(), strict=True)}
    allowed = set(zip(words[::2], words[1::2], strict=True)) | set(zip(words[1::2], words[::2], strict=True))
    assert pairs and {pair for pair in pairs if not any(set(word) == {"x"} for word in pair)} <= allowed


def test_skip_grams_say_how_much_text_they_need(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sizes(monkeypatch)
    (tmp_path / "little.txt").write_text("a fish\n\nand another")
    monkeypatch.setenv("SHOAL_DATA", str(tmp_path))
    with pytest.raises(shoal.InputError, match="1 texts with 3 words in 2 paragraphs; at least 1,000 words in 20"):
        load_job(str(EXAMPLES / "skipgram.py"))
