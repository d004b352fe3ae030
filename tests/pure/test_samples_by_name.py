"""Samples by name: how they become a batch, a model's arguments, a loss and its count."""

import re
from collections import OrderedDict, UserDict
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

import shoal
from shoal.errors import JobError
from shoal.job.collate import collate
from shoal.job.dataset import open_data
from shoal.job.loss import Objective
from shoal.job.mean_counts import LaneCounts, MeanWatch, labels_kept
from shoal.job.model_call import ModelCall, loss_of, model_call

IDS = [[1, 2, 3], [4, 5, 6]]


def rows(**columns: list[Any]) -> list[dict[str, Any]]:
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


# -- batches ----------------------------------------------------------------------------------------------------------


def test_lists_numbers_and_arrays_under_a_key_become_one_tensor() -> None:
    batch = collate(rows(ids=IDS, score=[0.5, 1.5], label=[1, 0], array=[np.zeros(2, np.float32)] * 2, flag=[True] * 2))
    assert torch.equal(batch["ids"], torch.tensor(IDS))
    assert (batch["score"].dtype, batch["label"].dtype) == (torch.float32, torch.int64)
    assert (batch["array"].shape, batch["array"].dtype, batch["flag"].dtype) == ((2, 2), torch.float32, torch.bool)


def test_samples_nest() -> None:
    inner = rows(a=[torch.ones(2), torch.zeros(2)])
    batch = collate([({"x": each, "y": [1]}, 3) for each in inner])
    assert isinstance(batch, tuple)
    assert batch[0]["x"]["a"].shape == (2, 2)
    assert torch.equal(batch[0]["y"], torch.tensor([[1], [1]]))
    assert torch.equal(batch[1], torch.tensor([3, 3]))


def test_samples_without_a_mapping_are_collated_as_before() -> None:
    samples = [(torch.ones(3), 0.5, [1, 2]), (torch.zeros(3), 1.5, [3, 4])]
    ours, theirs = collate(samples), default_collate(samples)
    assert torch.equal(ours[0], theirs[0])
    assert ours[1].dtype == theirs[1].dtype == torch.float64
    assert str(ours[2]) == str(theirs[2])


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (rows(ids=IDS, text=["a", "b"]), "a sample has a string under 'text'"),
        (rows(meta=rows(words=[["a"], ["b"]])), "a sample has a string under 'meta.words'"),
        (rows(ids=IDS, image=[object(), object()]), "a sample has a object under 'image'"),
        (rows(ids=[[1], None]), "a sample has None under 'ids'"),
        (rows(ids=[[1, 2], [3]]), "samples of one batch differ in length under 'ids': 2 and 1"),
        (rows(ids=[torch.ones(2), torch.ones(3)]), "differ in length under 'ids': 2 and 3"),
        ([{"a": 1, "b": 2}, {"a": 1}], "different keys: one has 'b', another only 'a'"),
    ],
)
def test_what_cannot_be_a_tensor_is_named_by_its_key(samples: list[Any], message: str) -> None:
    with pytest.raises(JobError, match=re.escape(message)) as raised:
        collate(samples)
    assert "collate_fn" in str(raised.value.fix)


def test_collate_fn_is_the_jobs_or_else_the_loaders() -> None:
    def pad(samples: list[dict[str, list[int]]]) -> Any:
        tensors = [torch.tensor(sample["ids"]) for sample in samples]
        return UserDict(ids=nn.utils.rnn.pad_sequence(tensors, batch_first=True))  # as tokenizers return it

    data = rows(ids=[[1, 2], [3], [4, 5, 6]])
    for source in (
        open_data(data, seed=0, collate_fn=pad),
        open_data(DataLoader(data, batch_size=2, collate_fn=pad), seed=0),  # type: ignore[arg-type]
        open_data(DataLoader(data, batch_size=2), seed=0, collate_fn=pad),  # type: ignore[arg-type]
    ):
        batch = source.fetch([0, 2], 0)
        assert type(batch) is dict
        assert batch["ids"].tolist() == [[1, 2, 0], [4, 5, 6]]
    doubled = open_data((torch.ones(4), torch.zeros(4)), seed=0, collate_fn=lambda samples: len(samples))
    assert doubled.fetch([0, 1, 2], 0) == 3
    loader = DataLoader(TensorDataset(torch.ones(4)), batch_size=2)
    assert open_data(loader, seed=0, collate_fn=lambda samples: len(samples)).fetch([0, 1], 0) == 2


def test_a_hugging_face_data_set_with_and_without_a_format() -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"ids": IDS, "labels": [0, 1]})
    for each in (data, data.with_format("torch"), data.with_format("numpy")):
        batch = open_data(each, seed=0, shuffle=False).fetch([1, 0], 0)
        assert batch["ids"].tolist() == [IDS[1], IDS[0]]
        assert (batch["labels"].tolist(), batch["labels"].dtype) == ([1, 0], torch.int64)


# -- arguments of the model -------------------------------------------------------------------------------------------


class Named(nn.Module):
    def forward(self, ids: Any, mask: Any = None) -> Any:
        return ids, mask


class WithLoss(nn.Module):
    def forward(self, ids: Any, labels: Any = None) -> Any:
        return ids, labels


class Whole(nn.Module):
    def forward(self, batch: Any) -> Any:
        return batch


class AnyName(nn.Module):
    def forward(self, **batch: Any) -> Any:
        return batch


@pytest.mark.parametrize(
    ("model", "own_loss", "batch", "call"),
    [
        (Named(), False, (1, 2, 3), ModelCall((1, 2), {})),
        (Named(), True, (1, 2, 3), ModelCall((1, 2, 3), {})),
        (Named(), False, {"ids": 1, "labels": 2, "other": 3}, ModelCall((), {"ids": 1})),
        (WithLoss(), False, {"ids": 1, "labels": 2}, ModelCall((), {"ids": 1})),
        (WithLoss(), True, {"ids": 1, "labels": 2}, ModelCall((), {"ids": 1, "labels": 2})),
        (WithLoss(), True, {"ids": 1, "label": 2}, ModelCall((), {"ids": 1, "labels": 2})),
        (Whole(), False, {"ids": 1, "labels": 2}, ModelCall(({"ids": 1, "labels": 2},), {})),
        (Whole(), True, {"ids": 1}, ModelCall(({"ids": 1},), {})),
        (AnyName(), False, {"ids": 1, "label": 2}, ModelCall((), {"ids": 1})),
        (AnyName(), True, UserDict(ids=1, label=2), ModelCall((), {"ids": 1, "label": 2})),
        (Named(), False, ({"ids": 1}, 2), ModelCall(({"ids": 1},), {})),
    ],
)
def test_the_arguments_of_a_model(model: nn.Module, own_loss: bool, batch: Any, call: ModelCall) -> None:
    assert model_call(model, batch, model_has_loss=own_loss) == call


@pytest.mark.parametrize(
    ("model", "batch", "message"),
    [
        (WithLoss(), {"ids": 1, "idx": 2}, "samples have 'idx', which forward of WithLoss does not take"),
        (WithLoss(), {"labels": 1}, "forward of WithLoss needs 'ids', and samples have 'labels'"),
    ],
)
def test_keys_that_do_not_fit_forward(model: nn.Module, batch: Any, message: str) -> None:
    with pytest.raises(JobError, match=re.escape(message)):
        model_call(model, batch, model_has_loss=True)


class Output(OrderedDict[str, Any]):
    """As transformers has it: by name and by key."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


def test_the_loss_of_what_a_model_returned() -> None:
    loss = torch.tensor(2.0)
    for output in (loss, (loss, torch.ones(3)), {"loss": loss}, Output(loss=loss, logits=1), [loss]):
        assert loss_of(output) is loss
    assert loss_of({"loss": (loss, 3)}) == (loss, 3)
    for bad in (torch.ones(3), {"logits": loss}, Output(loss=None), 3.0):
        with pytest.raises(JobError, match='loss="model"'):
            loss_of(bad)


# -- counts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "count"),
    [
        (lambda x, y: F.cross_entropy(x, y), 3),
        (lambda x, y: F.cross_entropy(x, y.clamp(0), ignore_index=1), 2),
        (lambda x, y: nn.CrossEntropyLoss()(x, y), 3),
        (lambda x, y: F.cross_entropy(x, y, weight=torch.tensor([1.0, 10.0, 100.0])), 120),
        (lambda x, y: F.cross_entropy(x, x.softmax(1)), 4),
        (lambda x, y: F.nll_loss(x.log_softmax(1), y), 3),
        (lambda x, y: F.mse_loss(x, x + 1), 12),
        (lambda x, y: F.cross_entropy(x, y, reduction="sum"), None),
    ],
)
def test_the_number_that_a_loss_is_a_mean_over(loss: Any, count: int | None) -> None:
    x, y = torch.randn(4, 3), torch.tensor([1, -100, 1, 2])
    with MeanWatch() as watch:
        found = loss(x, y)
    assert watch.count() == count
    assert watch.count_of(found) == count


def test_means_by_hand_are_seen_for_what_they_are() -> None:
    x, mask = torch.randn(4, 3), torch.tensor([1.0, 0.0, 1.0, 1.0])
    with MeanWatch() as watch:
        mean, masked = x.mean(), (x.sum(1) * mask).sum() / mask.sum()
        scaled = masked / 2
    assert (watch.count_of(mean), watch.count_of(masked), watch.count_of(scaled)) == (12, 3, None)
    assert watch.count() is None  # not a loss function of torch: the job's weights stay by samples


def test_watching_a_loss_of_ones_own_changes_nothing() -> None:
    """Only the first microbatches are watched, and which those are depends on the placement."""
    scores, ignored = torch.randn(2, 3), torch.full((2,), -100)
    with MeanWatch() as watch:
        seen = nn.functional.cross_entropy(scores, ignored)
    assert seen.isnan() and nn.functional.cross_entropy(scores, ignored).isnan()
    assert watch.count_of(seen) == 0


def test_a_microbatch_without_a_label_weighs_nothing() -> None:
    model = TokenModel()
    objective = Objective(token_job(), model)
    total, count = objective({"ids": torch.tensor([[1, 2]]), "labels": torch.full((1, 2), -100)})
    assert (total.item(), count) == (0.0, 0.0)
    total.backward()
    assert not model.head.weight.grad.any()  # type: ignore[union-attr]


class TokenModel(nn.Module):
    """Shifts its labels, as causal language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.embed(ids))
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, 8), labels[:, 1:].reshape(-1))
        return {"loss": loss, "logits": logits}


def token_job(**fields: Any) -> shoal.Job:
    data = rows(ids=[[1, 2, 3]] * 8, labels=[[1, 2, 3]] * 8)
    usual: dict[str, Any] = {"model": TokenModel, "data": data, "loss": "model", "optimizer": torch.optim.SGD}
    usual |= {"batch": 4, "steps": 1}
    return shoal.Job(**usual | fields)


def test_the_count_of_a_model_that_shifts_its_labels() -> None:
    objective = Objective(token_job(), TokenModel())
    labels = torch.tensor([[1, 2, 3], [1, -100, -100]])
    _, count = objective({"ids": torch.ones(2, 3, dtype=torch.int64), "labels": labels})
    assert count == 2  # of the four labels that are not ignored the model predicts two
    assert objective.evaluation()({"ids": torch.ones(2, 3, dtype=torch.int64), "labels": labels})["loss"][1] == 2
    assert labels_kept({"labels": labels}) == 4


@pytest.mark.parametrize(
    ("kind", "count"), [("GPT2LMHeadModel", 5), ("BertForMaskedLM", 7), ("T5ForConditionalGeneration", 7)]
)
def test_the_count_of_models_of_transformers(kind: str, count: int) -> None:
    """GPT-2 shifts its labels, the others do not; what transformers calls the type of the loss does not tell."""
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    configs = {
        "GPT2LMHeadModel": lambda: transformers.GPT2Config(
            vocab_size=16, n_embd=8, n_layer=1, n_head=2, n_positions=8, bos_token_id=0, eos_token_id=0
        ),
        "BertForMaskedLM": lambda: transformers.BertConfig(**small, intermediate_size=8),
        "T5ForConditionalGeneration": lambda: transformers.T5Config(
            vocab_size=16, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0
        ),
    }
    model = getattr(transformers, kind)(configs[kind]()).eval()
    labels = torch.tensor([[1, 2, 3, -100], [4, 5, 6, 7]])
    total, found = Objective(token_job(), model)({"input_ids": labels.clamp(0), "labels": labels})
    assert found == count
    assert torch.equal(total, model(input_ids=labels.clamp(0), labels=labels).loss * count)


def test_lanes_are_uneven_when_a_sample_counts_for_different_numbers() -> None:
    counts = LaneCounts()
    counts.add(8, 4)
    counts.add(4, 2)  # a short last batch is not uneven
    counts.add(None, 4)
    assert not counts.uneven
    counts.add(7, 4)
    assert counts.uneven and not counts.looking


def test_a_loss_function_is_watched_and_its_value_is_not_touched() -> None:
    job = token_job(model=Named, loss=lambda out, batch: F.cross_entropy(out[0].float(), batch["labels"]))
    objective = Objective(job, Named())
    given = {"ids": torch.randn(3, 5), "labels": torch.tensor([1, 2, -100])}
    loss = objective(given)
    assert isinstance(loss, Tensor)
    objective(given | {"labels": torch.tensor([1, 2, 3])})
    assert objective.lane_counts.uneven


def test_metrics_of_samples_by_name_get_the_batch() -> None:
    job = token_job(metrics={"size": lambda output, batch: float(len(batch["labels"]) + output["logits"].numel())})
    batch = {"ids": torch.ones(2, 3, dtype=torch.int64), "labels": torch.ones(2, 3, dtype=torch.int64)}
    assert Objective(job, TokenModel()).evaluation()(batch)["size"] == 2 + 2 * 3 * 8


# -- the job ----------------------------------------------------------------------------------------------------------


def test_a_new_field_is_part_of_the_arithmetic_only_where_it_is_given() -> None:
    assert "collate_fn" not in token_job().arithmetic()
    assert "collate_fn" in token_job(collate_fn=default_collate).arithmetic()
    assert token_job().arithmetic()["loss"] == "model"


def test_a_loss_that_is_neither_a_function_nor_the_models() -> None:
    with pytest.raises(JobError, match='loss must be callable, not str, or "model"'):
        token_job(loss="mse")
    with pytest.raises(JobError, match="collate_fn must be callable"):
        token_job(collate_fn=3)


def test_an_error_inside_of_a_model_says_what_it_was_called_with() -> None:
    objective = Objective(token_job(loss=F.mse_loss), nn.Sequential(nn.Linear(3, 2)))
    with pytest.raises(TypeError) as raised:
        objective({"pixels": torch.ones(4, 3), "label": torch.ones(4)})
    assert raised.value.__notes__ == [
        "the model (Sequential) was called with {pixels: 4×3 float32, label: 4 float32}",
        "its forward takes none of 'pixels', 'label' by name, and so it got the batch as it is",
    ]
