"""The safetensors format: the length of a header, the header as JSON, and the bytes of the tensors.

The safetensors library writes only tensors that are all in memory, in files for their owner alone, and maps the files
that it reads. A mapping counts as the process's own memory, and a worker under a memory limit may have less left than
the length of the file. So this module writes tensors one by one, and reads tensors or boxes of them into fresh memory.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor

from shoal.numerics.digest import tensor_bytes
from shoal.transport.decoding import decode_plain_json
from shoal.transport.frame_format import MAX_ELEMENTS

LENGTH_BYTES = 8  # of the length of the header, at the beginning of a file
# fmt: off
DTYPE_LABELS: dict[str, torch.dtype] = {  # by their names in the format, in the order of tensors in a file
    "U64": torch.uint64, "I64": torch.int64, "F64": torch.float64, "C64": torch.complex64,
    "F32": torch.float32, "U32": torch.uint32, "I32": torch.int32,
    "BF16": torch.bfloat16, "F16": torch.float16, "U16": torch.uint16, "I16": torch.int16,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}
# fmt: on
STORABLE_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPE_LABELS.values()}
_LABELS = {dtype: label for label, dtype in DTYPE_LABELS.items()}
_ORDER = {dtype: place for place, dtype in enumerate(_LABELS)}  # large elements first, so that all tensors are aligned

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
MAX_RANK = 64  # as torch has it

TensorSpecs = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]  # name -> dtype and shape


def write_safetensors(
    path: Path, specs: TensorSpecs, read: Callable[[str], Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Writes a file, byte for byte as the library does, with one tensor in memory at a time, which `read` returns."""
    names = sorted(specs, key=lambda name: (_ORDER[specs[name][0]], name))
    header: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name in names:
        dtype, shape = specs[name]
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _LABELS[dtype], "shape": list(shape), "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)
    with open(path, "wb") as file:
        file.write(len(encoded).to_bytes(LENGTH_BYTES, "little") + encoded)
        for name in names:
            file.write(tensor_bytes(read(name)))


class SafetensorsFile:
    """One file, open for reading. Anything wrong with it raises OSError or ValueError."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "rb")
        try:
            size = path.stat().st_size
            length = int.from_bytes(self._file.read(LENGTH_BYTES), "little")
            if size < LENGTH_BYTES or LENGTH_BYTES + length > size:
                raise ValueError(f"{path.name} is no safetensors file, or only the beginning of one")
            header = msgspec.convert(decode_plain_json(self._file.read(length)), dict[str, Any])
            self._start = LENGTH_BYTES + length
            self.metadata = msgspec.convert(header.pop("__metadata__", {}), dict[str, str])
            self._tensors = {name: _SafetensorsEntry(name, entry, size - self._start) for name, entry in header.items()}
        except msgspec.MsgspecError as error:
            self._file.close()
            raise ValueError(f"{path.name} is no safetensors file: {error}") from None
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "SafetensorsFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return DTYPE_LABELS[self._tensors[name].label]

    def read(self, name: str, box: tuple[slice, ...] = ()) -> Tensor:
        """A tensor in fresh memory, or a view of a box of it: a range per dimension. Other rows are not read."""
        found = self._tensors.get(name)
        if found is None:
            raise ValueError(f"{self._file.name} has no {name}")
        shape, start, dtype = found.shape, found.start, DTYPE_LABELS[found.label]
        if box and shape:
            first, stop, _ = box[0].indices(shape[0])
            start += first * math.prod(shape[1:]) * dtype.itemsize
            shape = (max(0, stop - first), *shape[1:])
        tensor = torch.empty(shape, dtype=dtype)
        if tensor.numel():
            self._file.seek(self._start + start)
            room = tensor.reshape(-1).view(torch.uint8).numpy().data
            if self._file.readinto(room) != room.nbytes:
                raise ValueError(f"{self._file.name} ends within {name}")
        return tensor[(slice(None), *box[1:])] if len(box) > 1 else tensor


class _StoredHeader(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[_Count, ...]
    data_offsets: tuple[_Count, _Count]


class _SafetensorsEntry:
    def __init__(self, name: str, entry: Any, size: int) -> None:
        given = msgspec.convert(entry, _StoredHeader)
        self.label, self.shape = given.dtype, given.shape
        self.start, stop = given.data_offsets
        if len(self.shape) > MAX_RANK or math.prod(each or 1 for each in self.shape) > MAX_ELEMENTS:
            raise ValueError(f"{name} has the shape {self.shape[:MAX_RANK]}, which no tensor has")
        if self.label not in DTYPE_LABELS:
            raise ValueError(f"{name} has the dtype {self.label}, which Shoal does not know")
        length = math.prod(self.shape) * DTYPE_LABELS[self.label].itemsize
        if not 0 <= self.start <= stop <= size or stop - self.start != length:
            raise ValueError(f"{name} is not within the file")
