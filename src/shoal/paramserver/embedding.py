"""`shoal.Embedding`: a table whose rows are on servers. A model looks rows up as in `nn.Embedding`.

    model = nn.Sequential(shoal.Embedding(10_000_000, 64, lr=0.1), nn.Flatten(), nn.Linear(640, 1))

    forward     ids ── unique ── pull ──> rows, a leaf of the graph ── repeated as in ids ──> output
    backward    gradient of the output ── added by id ──> gradient of the rows, kept in the module
    after       take_gradient() ──> ids and rows, for a push

A worker holds only the rows of its batch, and the table's optimizer runs on the servers. A module that is not attached
to servers has a table in this process, so that a model works anywhere.
"""

import hashlib
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.errors import InputError
from shoal.paramserver.messages import SparseSpec
from shoal.paramserver.row_cache import RowCache, wait_result
from shoal.paramserver.sharding import dtype_name
from shoal.paramserver.sparse_table import DTYPES, SparseTable, check_spec, combine, out_of_range

CALLS_KEPT = 63  # calls of one step whose rows are cached for recomputed blocks


class Embedding(nn.Module):
    """`rows` vectors of `dim` numbers. Before its first update a row is a function of (seed, row), with standard
    deviation `scale`.

    `optimizer` (sgd, momentum, adam, adamw, adagrad, row_adagrad) and its `settings` (lr, eps, …) update the table; the
    job's optimizer does not. `ids`: returns the ids that a batch will look up, so that rows can be prefetched. `cache`
    and `bound`: a worker caches so many of the hottest rows, which may be `bound` steps old. `evict_age`,
    `evict_least`: rows untouched for so many updates are evicted unless touched that often. `capacity`: the most rows
    on one server.
    """

    def __init__(
        self,
        rows: int,
        dim: int,
        *,
        ids: Callable[[Any], Tensor] | None = None,
        optimizer: str = "adagrad",
        scale: float = 0.01,
        cache: int = 0,
        bound: int = 0,
        evict_age: int = 0,
        evict_least: int = 0,
        capacity: int = 0,
        dtype: torch.dtype = torch.float32,
        **settings: float | bool,
    ) -> None:
        super().__init__()
        from shoal.paramserver.optimizers import check_settings

        check_settings(optimizer, settings)
        self.rows, self.dim, self.ids = rows, dim, ids
        self.cache, self.bound = cache, bound
        self.name = ""
        self._spec = SparseSpec(
            rows=rows,
            dim=dim,
            dtype=dtype_name(dtype),
            scale=scale,
            optimizer=optimizer,
            settings=dict(settings),
            evict_age=evict_age,
            evict_least=evict_least,
            capacity=capacity,
        )
        check_spec(self._spec, "Embedding")
        if cache < 0 or bound < 0:
            raise InputError(f"a cache of {cache} rows, with a bound of {bound} steps", fix="cache=4096, bound=4")
        self._source: Any = None
        self._table: SparseTable | None = None
        self._clear()

    def _clear(self) -> None:
        self._calls = 0
        self._gradients: list[tuple[int, Tensor, Tensor]] = []  # (number of the call, ids, rows)
        self._prefetched: list[tuple[Tensor, Any]] = []  # (ids, future of their rows) of at most two batches
        self._pulled: list[tuple[Tensor, Tensor]] = []  # (ids, rows) of this step

    def spec(self, seed: int = 0) -> SparseSpec:
        """The table's spec for the servers. Its seed includes the name: the tables of one job have different rows."""
        import msgspec

        digest = hashlib.sha256(f"{seed}/{self.name}".encode()).digest()
        return msgspec.structs.replace(self._spec, seed=int.from_bytes(digest[:8], "big") >> 1)

    def attach(self, name: str, source: Any) -> None:
        """Pulls rows from `source`, whose `pull(ids)` returns a tensor or its future."""
        self.name = name
        self._source = RowCache(source, self.cache, self.bound) if self.cache else source
        self._table = None
        self._clear()

    @property
    def attached(self) -> bool:
        return self._source is not None

    @property
    def table(self) -> SparseTable:
        """The table in this process, of a module that is not attached."""
        if self._table is None:
            self._table = SparseTable(self.spec(), name=self.name or "Embedding")
        return self._table

    def begin_step(self, version: int, *, keep_prefetched: bool = True) -> None:
        """Drops the last step's rows and gradients, and without `keep_prefetched` also prefetched rows."""
        self._calls, self._gradients, self._pulled = 0, [], []
        if not keep_prefetched:
            self._prefetched = []
        if isinstance(self._source, RowCache):
            self._source.begin_step(version)

    def prefetch(self, batch: Any, *, keep_last: bool = False) -> bool:
        """Requests the rows that a batch will look up, for calls of `forward` until the next prefetch. Does nothing,
        and returns False, without `ids`. `keep_last`: keeps the rows of the last prefetch, too."""
        if self.ids is None:
            return False
        unique = torch.unique(torch.as_tensor(self.ids(batch)).to("cpu", torch.int64))
        self._check(unique)
        self._prefetched = [*(self._prefetched[-1:] if keep_last else ()), (unique, self._pull(unique))]
        return True

    def forward(self, ids: Tensor) -> Tensor:
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            title = f"table {self.name}" if self.name else "Embedding"
            raise InputError(f"{title}: ids are {ids.dtype}", fix="integers: ids.long()")
        if _is_placeholder(ids):
            return self._placeholder(ids)
        unique, inverse = torch.unique(ids.detach().to("cpu", torch.int64), return_inverse=True)
        self._check(unique)
        rows = self._rows(unique).to(ids.device)
        if torch.is_grad_enabled():
            rows = rows.detach().requires_grad_()
            self._hook_gradient(rows, unique, self._calls)
            self._calls += 1
        return F.embedding(inverse.to(ids.device), rows)

    def take_gradient(self) -> tuple[Tensor, Tensor] | None:
        """Returns the gradient of all backward passes since the last call: ids, unique and rising, and rows. Gradients
        of one row are added in the order of calls of `forward`. None if there was no backward pass."""
        taken = sorted(self._gradients, key=lambda each: each[0])
        self._calls, self._gradients, self._pulled = 0, [], []
        if not taken:
            return None
        if len(taken) == 1:
            return taken[0][1:]
        return combine(torch.cat([ids for _, ids, _ in taken]), torch.cat([rows for _, _, rows in taken]))

    def update(self, version: int = 0) -> None:
        """Applies one optimizer step to the table in this process."""
        taken = self.take_gradient()
        if taken is not None:
            self.table.push(*taken, version)
        self.begin_step(version + 1, keep_prefetched=False)

    def _rows(self, unique: Tensor) -> Tensor:
        # A recomputed block gets the rows that it had: another worker may have changed them meanwhile.
        for ids, rows in self._pulled:
            if torch.equal(ids, unique):
                return rows
        prefetched = self._from_prefetched(unique)
        rows = wait_result(self._pull(unique)) if prefetched is None else prefetched
        if torch.is_grad_enabled():
            self._pulled = [*self._pulled[-CALLS_KEPT:], (unique, rows)]
        return rows

    def _from_prefetched(self, unique: Tensor) -> Tensor | None:
        for number, (ids, future) in enumerate(self._prefetched):
            if not len(unique) or not len(ids):
                continue
            place = torch.searchsorted(ids, unique).clamp_(max=len(ids) - 1)
            if torch.equal(ids[place], unique):
                rows = wait_result(future)
                self._prefetched[number] = ids, rows
                return rows if len(ids) == len(unique) else rows[place]
        return None

    def _pull(self, unique: Tensor) -> Any:
        return self.table.pull(unique) if self._source is None else self._source.pull(unique)

    def _hook_gradient(self, rows: Tensor, ids: Tensor, call: int) -> None:
        def collect(leaf: Tensor) -> None:
            assert leaf.grad is not None
            self._gradients.append((call, ids, leaf.grad.cpu()))
            leaf.grad = None

        rows.register_post_accumulate_grad_hook(collect)

    def _check(self, unique: Tensor) -> None:
        if len(unique) and (int(unique[0]) < 0 or int(unique[-1]) >= self.rows):
            raise out_of_range(unique, self.rows, self.name or "Embedding")

    def _placeholder(self, ids: Tensor) -> Tensor:
        """For meta and fake tensors: a tensor of the right shape that has a gradient."""
        kwargs: dict[str, Any] = {"dtype": DTYPES[self._spec.dtype], "device": ids.device}
        rows = torch.empty(min(self.rows, max(1, ids.numel())), self.dim, **kwargs)
        return F.embedding(ids, rows.requires_grad_(torch.is_grad_enabled()))

    def __getstate__(self) -> dict[str, Any]:
        """For copies: includes the rows of the table in this process, and no connection."""
        captured = self._table.capture() if self._table is not None and self._table.num_rows else None
        dropped: dict[str, Any] = {"_source": None, "_table": None, "_gradients": [], "_prefetched": [], "_pulled": []}
        return self.__dict__ | dropped | {"_captured": captured}

    def __setstate__(self, state: dict[str, Any]) -> None:
        captured = state.pop("_captured", None)
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if captured is not None:
            self.table.restore(captured)

    def extra_repr(self) -> str:
        return f"{self.rows}, {self.dim}, optimizer={self._spec.optimizer!r}"


def tables_of(model: nn.Module) -> list[tuple[str, Embedding]]:
    """The model's embeddings by module path, which becomes the table's name. A module used twice is one table."""
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, Embedding)]
    for name, module in found:
        module.name = name
    return found


def _is_placeholder(ids: Tensor) -> bool:
    fake = sys.modules.get("torch._subclasses.fake_tensor")  # imported if there is any fake tensor
    return ids.is_meta or (fake is not None and isinstance(ids, fake.FakeTensor))
