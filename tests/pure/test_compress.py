"""Compressors keep their word: as many bytes and as little error as their price says, and feedback loses nothing."""

import re
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from helpers.places import DOCS
from shoal.collectives.compression import (
    COMPRESSORS,
    CompressionStats,
    Compressor,
    ErrorFeedback,
    parse_compression,
    parse_compressor,
)
from shoal.collectives.compression.stats import ERROR_INTERVAL
from shoal.collectives.topology import level_setting
from shoal.errors import InputError, MismatchError

PAGE = DOCS / "compression.md"

BARE = ["fp16", "bf16", "int8", "int4-feedback", "topk:0.01-feedback", "onebit-feedback", "powersgd:4-feedback"]
FED = ["fp16+feedback", "bf16+feedback", "int8+feedback", "int4", "topk:0.01", "onebit", "powersgd:4"]
COUNTS = [0, 1, 63, 64, 65, 1000, 100003]


def noise(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def through(compressor: Compressor, flat: Tensor, key: object = 0) -> Tensor:
    return compressor.decode(compressor.encode(flat, key), flat.numel())


def distance(a: Tensor, b: Tensor) -> float:
    return float(torch.linalg.vector_norm(a.double() - b.double()))


# -- bytes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", BARE + FED)
def test_a_payload_has_the_length_that_its_count_says(word: str) -> None:
    compressor = parse_compressor(word)
    for count in COUNTS:
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            payload = compressor.encode(noise(count).to(dtype), (count, str(dtype)))
            assert payload.dtype == torch.uint8 and payload.shape == (compressor.payload_bytes(count),)
            values = compressor.decode(payload, count)
            assert values.dtype == torch.float32 and values.shape == (count,)


def test_bytes_are_what_the_price_says() -> None:
    count = 1 << 20
    lengths = {word: parse_compressor(word).payload_bytes(count) for word in BARE}
    assert lengths == {
        "fp16": 2 * count,
        "bf16": 2 * count,
        "int8": count + count // 256 * 4,
        "int4-feedback": count // 2 + count // 256 * 4,
        "topk:0.01-feedback": 10486 * 8,
        "onebit-feedback": count // 8 + count // 256 * 4,
        "powersgd:4-feedback": 32 * 1024,
    }


@pytest.mark.parametrize("word", BARE)
def test_a_payload_may_start_anywhere_in_its_buffer(word: str) -> None:
    compressor, flat = parse_compressor(word), noise(1000)
    payload = compressor.encode(flat, 0)
    for offset in (1, 2, 4):
        buffer = torch.zeros(offset + payload.numel(), dtype=torch.uint8)
        buffer[offset:] = payload
        assert torch.equal(compressor.decode(buffer[offset:], 1000), compressor.decode(payload, 1000))


@pytest.mark.parametrize("word", BARE)
def test_a_payload_does_not_change_with_the_tensor(word: str) -> None:
    flat = noise(1000).to(torch.bfloat16)
    payload = parse_compressor(word).encode(flat, 0)
    before = payload.clone()
    flat.zero_()
    assert torch.equal(payload, before)


def test_a_payload_of_another_length_is_refused_with_both_lengths() -> None:
    with pytest.raises(MismatchError, match=r"999 bytes came for 1,000 elements, but int8 makes 1,016") as caught:
        parse_compressor("int8").decode(torch.zeros(999, dtype=torch.uint8), 1000)
    assert "--compress" in str(caught.value)


@pytest.mark.parametrize("place", [-1, 100])
def test_a_place_that_is_not_there_cannot_be_written_to(place: int) -> None:
    payload = torch.tensor([place, 0], dtype=torch.int32).view(torch.uint8)
    with pytest.raises(RuntimeError, match="out of bounds"):
        parse_compressor("topk-feedback").decode(payload, 100)


# -- error ----------------------------------------------------------------------------------------------------------


def largest_of_block(flat: Tensor) -> Tensor:
    blocks = [block.abs().max().expand(len(block)) for block in flat.split(256)]
    return torch.cat(blocks)


ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "fp16": lambda flat: torch.where(
        flat.abs() > 65504, torch.inf, torch.maximum(flat.abs() / 2048, torch.tensor(3e-8))
    ),
    "bf16": lambda flat: flat.abs() / 256,
    "int8": lambda flat: largest_of_block(flat) / 254,
    "int4-feedback": lambda flat: largest_of_block(flat) / 14,
}
BY_NORM = {"topk:0.01-feedback": 0.99**0.5, "onebit-feedback": 1.0, "powersgd:4-feedback": 1.0}


@st.composite
def gradients(draw: st.DrawFn) -> Tensor:
    """Noise with a spread of magnitudes, zeros among it, of any length round the blocks' edges."""
    count = draw(st.sampled_from([1, 255, 256, 257, 1000, 4096]))
    flat = noise(count, draw(st.integers(0, 1000))) * 10.0 ** draw(st.integers(-6, 3))
    flat = flat * noise(count, 7).abs().pow(draw(st.integers(0, 4)))
    zeros = draw(st.integers(0, count))
    return torch.cat([torch.zeros(zeros), flat[zeros:]])


@pytest.mark.parametrize("word", ELEMENTWISE)
@settings(max_examples=40)
@given(flat=gradients())
def test_each_element_is_as_close_as_the_price_says(word: str, flat: Tensor) -> None:
    error = (through(parse_compressor(word), flat).double() - flat.double()).abs()
    assert bool((error <= 1.001 * ELEMENTWISE[word](flat) + 1e-37).all())


@pytest.mark.parametrize("word", BY_NORM)
@settings(max_examples=40)
@given(flat=gradients())
def test_the_whole_is_as_close_as_the_price_says(word: str, flat: Tensor) -> None:
    assert distance(through(parse_compressor(word), flat), flat) <= BY_NORM[word] * float(flat.norm()) * 1.0001


@pytest.mark.parametrize("word", BARE)
def test_zero_stays_zero_and_tiny_does_not_explode(word: str) -> None:
    compressor = parse_compressor(word)
    assert torch.equal(through(compressor, torch.zeros(1000)), torch.zeros(1000))
    for size in (1e-45, 1e-38, 1e-30):
        assert distance(through(compressor, torch.full((1000,), size)), torch.zeros(1000)) < 1e-28


def test_what_is_too_small_for_a_scale_is_rounded_and_not_scrambled() -> None:
    """A scale of its own would have an inverse above the range of fp32."""
    flat = torch.full((256,), 2e-37)
    assert float((through(parse_compressor("int8"), flat) - flat).abs().max()) <= 1e-35 / 254


def test_a_matrix_of_low_rank_passes_whole() -> None:
    flat = (noise(100, 1).view(100, 1) @ noise(100, 2).view(1, 100)).flatten()
    assert distance(through(parse_compressor("powersgd:2-feedback"), flat), flat) < 1e-5 * float(flat.norm())


def test_a_warm_start_finds_the_directions_that_last() -> None:
    compressor = parse_compressor("powersgd:2-feedback")
    flat = (noise(200, 1).view(100, 2) @ noise(200, 2).view(2, 100) + 0.3 * noise(10_000, 3).view(100, 100)).flatten()
    first, *_, last = [distance(through(compressor, flat, "weight"), flat) for _ in range(5)]
    left = torch.linalg.svdvals(flat.view(100, 100))[2:].norm()
    assert last < first
    assert last == pytest.approx(float(left), rel=1e-3)  # no pair of directions does better


@pytest.mark.parametrize(
    "flat",
    [
        noise(100_003),
        torch.ones(100_003),  # all are equally large: the threshold lets all through
        noise(100_003) * torch.ones(100_003).index_fill_(0, torch.arange(0, 100_003, 6), 100.0),  # every sixth is seen
    ],
    ids=["noise", "equal", "large where samples are taken"],
)
def test_topk_keeps_the_largest(flat: Tensor) -> None:
    found = through(parse_compressor("topk-feedback"), flat)
    kept = found.nonzero().flatten()
    assert len(kept) == 1001
    assert torch.equal(found[kept], flat[kept])
    assert torch.equal(flat[kept].abs().sort().values, flat.abs().topk(1001).values.sort().values)


# -- what is not finite ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", BARE + FED)
def test_what_is_not_finite_does_not_arrive_as_a_number(word: str) -> None:
    compressor = parse_compressor(word)
    through(compressor, noise(70_000))
    for bad in (torch.nan, torch.inf, -torch.inf):
        for place in (0, 300, 69_999):
            flat = noise(70_000)
            flat[place] = bad
            assert not through(compressor, flat)[place].isfinite()
            # The step is dropped, and the next one must not suffer.
            assert bool(through(compressor, noise(70_000, 1)).isfinite().all())


@pytest.mark.parametrize("word", ["int8", "int4-feedback", "onebit-feedback"])
def test_only_the_block_that_is_not_finite_is_lost(word: str) -> None:
    flat = noise(1000)
    flat[300] = torch.inf
    lost = through(parse_compressor(word), flat).isnan()
    assert lost.nonzero().flatten().tolist() == list(range(256, 512))


# -- error feedback -------------------------------------------------------------------------------------------------


# A tenth is kept: with a hundredth it would take more steps until everybody has had its turn.
FED_QUICKLY = ["topk:0.1" if word.startswith("topk") else word for word in FED]


@pytest.mark.parametrize("word", FED_QUICKLY)
def test_with_feedback_the_sum_of_messages_follows_the_sum_of_gradients(word: str) -> None:
    compressor, gradient = parse_compressor(word), noise(1000)
    decoded, errors = torch.zeros(1000, dtype=torch.float64), []
    for step in range(1, 201):
        decoded += through(compressor, gradient)
        errors.append(distance(decoded, step * gradient.double()))
    # The sum lacks what the last message left out, neither more nor less …
    (residual,) = (value for name, value in compressor.state().items() if name.startswith("residual"))
    assert distance(decoded + residual, 200 * gradient.double()) < 1e-4 * float(gradient.norm())
    # … and that does not grow from message to message.
    assert max(errors[100:]) <= 1.5 * max(errors[:100])


def descend(word: str, steps: int = 400) -> float:
    """Where SGD ends, as a share of the way: four workers who want different things, of which the mean is wanted."""
    compressors = [parse_compressor(word) for _ in range(4)]
    goals = noise(4 * 600).view(4, 600) * 3 + 1
    point = torch.zeros(600)
    for step in range(steps):
        messages = [through(each, point - goal) for each, goal in zip(compressors, goals, strict=True)]
        point -= 0.1 * 0.985**step * torch.stack(messages).mean(0)
    return distance(point, goals.mean(0)) / float(goals.mean(0).norm())


@pytest.mark.parametrize("word", FED_QUICKLY)
def test_training_converges_with_feedback(word: str) -> None:
    assert descend(word) < 0.05


@pytest.mark.parametrize("word", ["int4", "topk:0.1", "onebit", "powersgd:4"])
def test_training_without_feedback_ends_elsewhere(word: str) -> None:
    assert descend(f"{word}-feedback") > 10 * descend(word)


def test_streams_do_not_mix_and_a_new_cut_starts_afresh() -> None:
    compressor, gradient = parse_compressor("onebit"), noise(1000)
    first = compressor.encode(gradient, ("weight", 0))
    assert torch.equal(compressor.encode(gradient, ("weight", 1)), first)
    assert not torch.equal(compressor.encode(gradient, ("weight", 0)), first)
    assert torch.equal(
        compressor.encode(gradient[:500], ("weight", 0)), parse_compressor("onebit").encode(gradient[:500], 0)
    )


# -- the same again -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", BARE + FED)
def test_the_same_stream_gives_the_same_bytes(word: str) -> None:
    torch.use_deterministic_algorithms(True)  # as in a worker
    generator = torch.random.get_rng_state()
    one, other = parse_compressor(word), parse_compressor(word)
    for step in range(3):
        payload = one.encode(noise(100_003, step), "weight")
        assert torch.equal(payload, other.encode(noise(100_003, step), "weight"))
        assert torch.equal(one.decode(payload, 100_003), other.decode(payload, 100_003))
    assert torch.equal(torch.random.get_rng_state(), generator)


@pytest.mark.parametrize("word", BARE + FED)
def test_a_restored_compressor_goes_on_where_the_other_stopped(word: str) -> None:
    one, other = parse_compressor(word), parse_compressor(word)
    for step in range(3):
        one.encode(noise(1000, step), ("weight", 0, "up"))
    state = one.state()
    other.encode(noise(1000, 9), ("forgotten", 0, "up"))
    other.restore(state)
    for key in (("weight", 0, "up"), ("forgotten", 0, "up")):
        assert torch.equal(one.encode(noise(1000, 4), key), other.encode(noise(1000, 4), key))
    assert one.state().keys() == other.state().keys()


# -- the meter ------------------------------------------------------------------------------------------------------


def test_the_meter_adds_up_bytes_and_error() -> None:
    compressor, meter = parse_compressor("int4-feedback"), CompressionStats()
    errors, values = 0.0, 0.0
    for step in range(2 * ERROR_INTERVAL):
        flat = noise(1000, step)
        payload = meter.encode(compressor, flat, 0)
        if step % ERROR_INTERVAL == 0:
            errors += distance(compressor.decode(payload, 1000), flat) ** 2
            values += float(flat.norm()) ** 2
    assert (meter.encodes, meter.bytes_plain, meter.bytes_sent) == (34, 34 * 4000, 34 * 516)
    assert meter.saved_fraction == pytest.approx(1 - 516 / 4000)
    assert meter.relative_error == pytest.approx((errors / values) ** 0.5)
    both = CompressionStats()
    both.add(meter)
    both.add(meter)
    assert both.bytes_sent == 2 * meter.bytes_sent and both.relative_error == pytest.approx(meter.relative_error)


@pytest.mark.parametrize("word", FED)
def test_the_error_on_the_meter_is_that_of_the_price(word: str) -> None:
    """Also with feedback, when a message carries many times the gradient that it was made for."""
    fed = parse_compressor(word)
    for _ in range(100):
        fed.encode(noise(1000), 0)
    assert isinstance(fed, ErrorFeedback)
    carried = noise(1000) + fed.residual(0)
    meter = CompressionStats()
    decoded = fed.decode(meter.encode(fed, noise(1000), 0), 1000)
    assert meter.relative_error == pytest.approx(distance(decoded, carried) / float(carried.norm()), rel=0.01)
    assert meter.relative_error < 1


def test_a_meter_survives_what_is_not_finite() -> None:
    compressor, meter = parse_compressor("int8"), CompressionStats()
    assert meter.relative_error == meter.saved_fraction == 0.0
    flat = torch.full((10,), torch.nan)
    meter.encode(compressor, flat, 0)
    assert meter.bytes_plain == 40 and meter.relative_error == 0.0


# -- the setting ----------------------------------------------------------------------------------------------------


def names(text: str) -> dict[str, str]:
    return {level: compressor.name for level, compressor in parse_compression(text).items()}


def test_the_setting_says_who_compresses_where() -> None:
    assert names("bf16") == {"host": "bf16"}
    assert names("int8@host, powersgd:4@rack") == {"host": "int8", "rack": "powersgd:4"}
    assert names("topk:2.5%@rack") == names("topk:0.025@rack") == {"rack": "topk:0.025"}
    assert names("topk,powersgd@rack") == {"host": "topk:0.01", "rack": "powersgd:4"}
    both, slow = parse_compression("int8"), parse_compression("int8,onebit@rack")
    assert level_setting(both, "rack") is both["host"] and level_setting(slow, "rack") is slow["rack"]
    assert level_setting(parse_compression("int8@rack"), "host") is None


@pytest.mark.parametrize("word", BARE + FED + ["topk:1e-05", "topk:0.333333-feedback"])
def test_a_name_that_was_printed_can_be_pasted(word: str) -> None:
    compressor = parse_compressor(word)
    assert compressor.name == word
    assert isinstance(compressor, ErrorFeedback) == (word not in BARE and not word.endswith("-feedback"))


ALL = "there are fp16, bf16, int8, int4, topk, onebit, powersgd"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("int9@host", f"there is no compressor 'int9'; {ALL}\n  --compress int9@host\n  fix: did you mean int8?"),
        ("zip", f"there is no compressor 'zip'; {ALL}\n  --compress zip\n  fix: for example --compress int8@host,"),
        ("", "there is no compressor ''; there are"),
        ("int8@rak", "there is no level 'rak'; there are host, rack\n  --compress int8@rak\n  fix: did you mean rack?"),
        ("int8@", "there is no level ''; there are host, rack"),
        ("int8,bf16@host", "two compressors for the traffic between hosts: int8 and bf16"),
        ("bf16:2", "bf16 takes no parameter, but got '2'"),
        ("topk:0", "topk keeps a share above 0 and up to 1 (100%), not '0'"),
        ("topk:200%", "not '200%'"),
        ("topk:nan", "not 'nan'"),
        ("topk:some", "not 'some'"),
        ("topk:", "not ''"),
        ("powersgd:0", "powersgd takes a rank, a whole number from 1 to 256, not '0'"),
        ("powersgd:1.5", "not '1.5'"),
        ("int8+feedbak", "there is no compressor 'int8+feedbak'"),
        ("int8-feedback+feedback", "there is no compressor 'int8-feedback'"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_with_what_there_is(text: str, says: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_compression(text)
    assert says in str(caught.value)
    assert f"--compress {text}" in str(caught.value)


def test_the_page_states_the_price_of_every_compressor() -> None:
    if not PAGE.exists():
        pytest.skip("not in a checkout")
    text = PAGE.read_text()
    assert [word for word in COMPRESSORS if parse_compressor(f"{word}-feedback").cost_summary not in text] == []
    for setting in re.findall(r"--compress ([\w:%.+@,-]+)", text):
        parse_compression(setting)
