"""A Hugging Face language model on sentences of different lengths, padded: samples by name, the loss inside the model.

    shoal train examples/first_day/hf_padded.py --workers 2
    shoal verify examples/first_day/hf_padded.py --against plain

Labels of padding are -100, which the model's loss ignores. The mean is over all other tokens of the global batch, on
any number of workers, although lanes hold different numbers of them. Needs `pip install transformers datasets`.
"""

import random

import torch

import shoal

try:
    import datasets
    import transformers
except ImportError as error:
    raise SystemExit(f"skipped: {error.name} is missing (pip install transformers datasets)") from None

WORDS, PADDING, IGNORED = 64, 0, -100


def sentences(count: int) -> datasets.Dataset:
    """Each counts up from some number, and is from 4 to 20 tokens long."""
    draw = random.Random(0)
    starts = [(draw.randrange(1, WORDS), draw.randrange(4, 21)) for _ in range(count)]
    tokens = [[1 + (first + place) % (WORDS - 1) for place in range(length)] for first, length in starts]
    return datasets.Dataset.from_dict({"input_ids": tokens})


def pad(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """To the longest sentence of these."""
    rows = [torch.tensor(sample["input_ids"]) for sample in samples]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PADDING)
    mask = ids != PADDING
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, IGNORED)}


def model() -> torch.nn.Module:
    config = transformers.GPT2Config(vocab_size=WORDS, n_positions=32, n_embd=32, n_layer=2, n_head=2, use_cache=False)
    return transformers.GPT2LMHeadModel(config)


job = shoal.Job(
    model=model,
    data=sentences(256),
    collate_fn=pad,
    loss="model",
    optimizer=lambda named: torch.optim.AdamW([weight for _, weight in named], lr=3e-3),
    evaluate=sentences(64),
    batch=32,
    steps=20,
    name="hf_padded",
)
