"""Describes a transformer by its shape alone, without code: parameters, FLOPs, and its work operator by operator.

    layers=96,hidden=12288,heads=96,seq=2048,vocab=51200

The default is a GPT as in Megatron: learned positions, tied embeddings, two layer norms. Options are `ffn` (4 h),
`kv_heads` (as heads) and `gated` (three matrices in the feed-forward; positions cost nothing, norms have one vector,
there are no biases, and the output has a matrix of its own, as in Llama).

Sources: Narayanan et al., SC21 (FLOPs, parameters); Korthikanti et al. 2022 (activations).
"""

from dataclasses import dataclass, fields
from difflib import get_close_matches

from shoal.errors import InputError
from shoal.planner.cost.workload import Block, Op, Workload

MAX_LAYERS = 1000  # cutting them into stages takes time with their square
EXAMPLE = "layers=96,hidden=12288,heads=96,seq=2048,vocab=51200"
# Flash attention does half of the s² products that are counted where it is causal, at 0.6 of the speed of a plain
# product in forward; backward does five for the four that count, at 0.4. Fitted to MPT on A100 and H100.
FLASH_FORWARD = 1.2
FLASH_BACKWARD = 0.65


@dataclass(frozen=True, kw_only=True)
class TransformerShape:
    layers: int
    hidden: int
    heads: int
    seq: int
    vocab: int
    ffn: int = 0  # 0: 4 h
    kv_heads: int = 0  # 0: as many as heads
    gated: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "ffn", self.ffn or 4 * self.hidden)
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        for each in fields(self):
            if getattr(self, each.name) < (0 if each.name == "gated" else 1):
                raise InputError(f"{each.name} is {getattr(self, each.name)}: at least 1", fix=EXAMPLE)
        if self.layers > MAX_LAYERS:
            raise InputError(f"layers is {self.layers:,}: at most {MAX_LAYERS:,}", fix=EXAMPLE)
        for what, of in (("hidden", "heads"), ("heads", "kv_heads")):
            total, divisor = getattr(self, what), getattr(self, of)
            if total % divisor:
                fix = f"{what} = {max(1, total // divisor) * divisor}"
                raise InputError(f"{what} {total} is not divisible by {of} {divisor}", fix=fix)

    @classmethod
    def parse(cls, text: str) -> "TransformerShape":
        """Parses `layers=96,hidden=12288,…`."""
        names = [each.name for each in fields(cls)]
        found: dict[str, int] = {}
        for item in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = item.partition("=")
            if name not in names:
                near = get_close_matches(name, names, n=1)
                fix = f"did you mean {near[0]}?" if near else f"one of {', '.join(names)}"
                raise InputError(f"a shape has no {name!r}", fix=fix)
            if name in found:
                raise InputError(f"the shape has {name} twice", fix=EXAMPLE)
            found[name] = _number(name, value.strip())
        missing = [name for name in names[:5] if name not in found]
        if missing:
            raise InputError(f"the shape lacks {', '.join(missing)}", fix=f"for example {EXAMPLE}")
        return cls(**{**found, "gated": bool(found.get("gated", 0))})  # type: ignore[arg-type]

    # -- counts -------------------------------------------------------------------------------------------------------

    @property
    def kv_width(self) -> int:
        return self.hidden * self.kv_heads // self.heads

    @property
    def matrices(self) -> int:
        """Parameters of a layer's matrices: attention 2h²(1 + g/a), feed-forward 2hf (×3/2 gated)."""
        attention = 2 * self.hidden * (self.hidden + self.kv_width)
        return attention + (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def vectors(self) -> int:
        """Biases and norms of a layer: 13h of a GPT; two norms of a gated one."""
        if self.gated:
            return 2 * self.hidden
        return 6 * self.hidden + 2 * self.kv_width + self.ffn + self.hidden

    @property
    def positions(self) -> int:
        return 0 if self.gated else self.seq * self.hidden

    @property
    def tied(self) -> bool:
        return not self.gated

    @property
    def parameters(self) -> int:
        """12Lh²(1 + 13/(12h) + (V+s)/(12Lh)) of a GPT, as the formula has it: without the last norm."""
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2) + self.positions
        return self.layers * (self.matrices + self.vectors) + embeddings

    def flops(self, batch: int = 1, recompute: str = "none") -> float:
        """FLOPs of the matrix products of one step, with full s² attention:

        none       72BLsh²(1 + s/6h + V/12Lh)
        full       96BLsh²(1 + s/6h + V/16Lh)     the layers' forward again
        selective  72BLsh²(1 + s/3h + V/12Lh)     as published; a third of the addition is really computed again
        """
        layer = 2.0 * self.seq * self.matrices + self.core_flops
        again = {"none": 0.0, "full": layer, "selective": 3 * self.core_flops}[recompute]
        return batch * (self.layers * (3 * layer + again) + 6.0 * self.seq * self.hidden * self.vocab)

    @property
    def core_flops(self) -> float:
        """FLOPs of attention's core forward, for one sample and layer: scores and context."""
        return 4.0 * self.seq * self.seq * self.hidden


def _number(name: str, value: str) -> int:
    if name == "gated" and value.lower() in ("true", "yes", "false", "no", ""):
        return int(value.lower() in ("true", "yes", ""))
    if not value.isdecimal() or len(value) > 12:
        raise InputError(f"{name}={value[:40]} is not a whole number", fix=EXAMPLE)
    return int(value)


# -- workload ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TransformerStyle:
    """What a training system adds to a shape."""

    flash: bool = True  # attention is one kernel that keeps no s² tensor
    dropout: bool = True  # after attention and feed-forward, with masks that are kept; inside attention if not flash
    rotary: bool = True  # positions rotate queries and keys: copies of both are kept
    tied: bool | None = None  # the output shares the embedding's matrix; None: as the shape specifies
    gradient_bytes: float = 4.0  # of a parameter: 4 where gradients are added up in fp32
    loss_bytes: float = 0.0  # of a logit, besides the 4 that are kept: while the loss is computed


GPT_2021 = TransformerStyle(flash=False, rotary=False)  # Megatron-LM until 2022
GPT = TransformerStyle()  # Megatron-LM since
# Llama, MPT and similar, under FSDP: 16 bytes of states; a loss made of operators, with gradients in fp32 and bf16.
PLAIN = TransformerStyle(dropout=False, gradient_bytes=2.0, loss_bytes=6.0)


def workload_of_shape(shape: TransformerShape, dtype: str = "bf16", style: TransformerStyle = GPT) -> Workload:
    """One block for the embedding, one for each layer, one for the head. Sizes are of one sample."""
    number = 4.0 if dtype == "fp32" else 2.0
    layer = _layer(shape, number, style)
    tied = shape.tied if style.tied is None else style.tied
    return Workload(
        name=f"{shape.parameters / 1e9:.3g}B",
        blocks=(_embedding(shape, number, style), *[layer] * shape.layers, _head(shape, number, style)),
        dtype=dtype,
        tied=float(shape.vocab * shape.hidden) if tied else 0.0,
        weight_bytes=number,
        gradient_bytes=style.gradient_bytes if dtype != "fp32" else 4.0,
        state_bytes=12.0 if dtype != "fp32" else 8.0,
        tokens=float(shape.seq),
        model_flops=shape.flops(),
    )


def _products(
    name: str, flops: float, weights: float, moved: float, number: float, *, half: bool = False, last: bool = False
) -> list[Op]:
    """A product with a weight: forward; backward once for the input and once for the weight."""
    sizes = {"bytes": number * (weights + moved), "fixed": number * weights, "sliced": True, "half": half}
    return [
        Op(name, flops, last=last, **sizes),  # type: ignore[arg-type]
        Op(name, flops, backward=True, **sizes),  # type: ignore[arg-type]
        Op(name, flops, backward=True, **sizes),  # type: ignore[arg-type]
    ]


def _passes(
    name: str,
    size: float,
    forward: float,
    backward: float,
    *,
    sliced: bool = False,
    core: bool = False,
    last: bool = False,
) -> list[Op]:
    """An operator without products: `forward` and `backward` bytes for each of `size` numbers."""
    return [
        Op(name, 0.0, size * forward, sliced=sliced, core=core, last=last),
        Op(name, 0.0, size * backward, backward=True, sliced=sliced, core=core),
    ]


def _layer(shape: TransformerShape, number: float, style: TransformerStyle) -> Block:
    s, h, f, kv = float(shape.seq), shape.hidden, shape.ffn, shape.kv_width
    wide, moved, moved_back = (2 * f, 3, 5) if shape.gated else (f, 2, 3)
    mask = 1.0 if style.dropout else 0.0
    turned = h + kv if style.rotary else 0
    ops = [
        *_passes("norm", s * h, 2 * number, 4 * number),
        *_products("qkv", 2 * s * h * (h + 2 * kv), h * (h + 2 * kv), s * (2 * h + 2 * kv), number),
        *(_passes("rotary", s * turned, 2 * number, 2 * number, sliced=True) if turned else ()),
        *_attention(shape, number, style),
        *_products("projection", 2 * s * h * h, h * h, 2 * s * h, number),
        *_passes("residual", s * h, 3 * number + mask, 2 * number + mask),
        *_passes("norm", s * h, 2 * number, 4 * number),
        *_products("fc1", 2 * s * h * wide, h * wide, s * (h + wide), number),
        *_passes("activation", s * f, moved * number, moved_back * number, sliced=True),
        *_products("fc2", 2 * s * h * f, h * f, s * (h + f), number, last=True),
        *_passes("residual", s * h, 3 * number + mask, 2 * number + mask, last=True),
    ]
    core = (number * 2 + 1) * shape.heads * s * s if not style.flash else 4.0 * shape.heads * s
    sliced = s * number * (h + 2 * kv + turned + h + wide + f)
    rest = s * h * (4 * number + 2 * mask)
    return Block(
        name="layer",
        ops=tuple(ops),
        parameters=float(shape.matrices + shape.vectors),
        sliced=float(shape.matrices) + (0.0 if shape.gated else h + 2.0 * kv + f),
        tensors=9 if shape.gated else 12,
        saved=rest + sliced + core,
        saved_sliced=sliced + core,
        saved_core=core,
        saved_input=number * s * h,
        working=number * s * wide,
        output=number * s * h,
        reduced=number * s * h,
        reductions=2.0,
    )


def _attention(shape: TransformerShape, number: float, style: TransformerStyle) -> list[Op]:
    s, h, a = float(shape.seq), shape.hidden, shape.heads
    kv = shape.kv_width
    if style.flash:
        moved = number * s * (2 * h + 2 * kv)
        kernel = {"sliced": True, "core": True, "fused": True, "half": True}
        return [
            Op("attention", shape.core_flops, moved, rate=FLASH_FORWARD, **kernel),
            Op("attention", 2 * shape.core_flops, 2 * moved, backward=True, rate=FLASH_BACKWARD, **kernel),
        ]
    half, square, moved = shape.core_flops / 2, a * s * s, number * s * (h + kv)
    product = {"bytes": number * square + moved, "sliced": True, "core": True, "half": True}
    ops = [Op(name, half, **product) for name in ("scores", "context")]  # type: ignore[arg-type]
    ops += [Op(op.name, half, backward=True, **product) for op in ops for _ in range(2)]  # type: ignore[arg-type]
    ops += _passes("softmax", square, 2 * number, 3 * number, sliced=True, core=True)
    if style.dropout:
        ops += _passes("dropout", square, 2 * number + 1, 2 * number + 1, sliced=True, core=True)
    return ops


def _embedding(shape: TransformerShape, number: float, style: TransformerStyle) -> Block:
    s, h, v = float(shape.seq), shape.hidden, shape.vocab
    return Block(
        name="embedding",
        ops=tuple(_passes("embedding", s * h, 3 * number, 3 * number)),
        parameters=float(v * h + shape.positions),
        sliced=float(v * h),
        tensors=1 if shape.gated else 2,
        saved=8.0 * s + (s * h if style.dropout else 0.0),
        working=number * s * h,
        output=number * s * h,
        reduced=number * s * h,
        reductions=0.5,  # forward only
        recomputed=False,
    )


def _head(shape: TransformerShape, number: float, style: TransformerStyle) -> Block:
    """The last norm, the product with the vocabulary and the loss, which keeps logits in fp32: 4sbV."""
    s, h, v = float(shape.seq), shape.hidden, shape.vocab
    ops = [
        *_passes("norm", s * h, 2 * number, 4 * number),
        *_products("logits", 2 * s * h * v, h * v, s * (h + v), number, half=True),
        *_passes("loss", s * v, 20.0, 10.0, sliced=True),
    ]
    return Block(
        name="head",
        ops=tuple(ops),
        parameters=float(v * h + (1 if shape.gated else 2) * h),
        sliced=float(v * h),
        tensors=1,
        saved=s * h * 2 * number + 4.0 * s * v,
        saved_sliced=4.0 * s * v,
        working=style.loss_bytes * s * v,
        output=0.0,
        reduced=number * s * h,
        reductions=0.5,  # backward only
        recomputed=False,
    )
