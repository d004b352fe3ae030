"""Routes played: with real processes."""

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.relay_lanes import Halves, held, summed
from helpers.routes import at
from shoal.collectives.choose_algorithm import candidates
from shoal.collectives.run_tree import TensorPool, TreeExecutor, TreeOptions, split_pieces
from shoal.numerics.digest import tensor_sha256
from shoal.numerics.lanes import Span
from shoal.testing import ranks


def singles(size: int) -> tuple[Span, ...]:
    return tuple((rank, rank + 1) for rank in range(size))


# -- processes --------------------------------------------------------------------------------------------------------


class GlooMessage:
    """A thread waits for it: gloo has no other way to learn of its end."""

    def __init__(self, mail: "GlooMail", work: Any) -> None:
        self.done, self._mail, self._work = False, mail, work
        self._thread = threading.Thread(target=self._end)
        self._thread.start()

    def _end(self) -> None:
        self._work.wait()
        with self._mail.changed:
            self.done = True
            self._mail.finished += 1
            self._mail.changed.notify_all()

    def wait(self) -> None:
        self._thread.join()


class GlooMail:
    def __init__(self, group: Any, rank: int, size: int) -> None:
        self.group, self.rank, self.size = group, rank, size
        self.changed, self.finished = threading.Condition(), 0

    def send(self, tensor: torch.Tensor, to: int, tag: int, like: object = None) -> GlooMessage:
        return GlooMessage(self, self.group.send([tensor], to, tag))

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> GlooMessage:
        return GlooMessage(self, self.group.recv([tensor], source, tag))

    def wait_news(self, finished: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.finished != finished, 60), "no message came"


def gloo_mail(path: Path, rank: int, size: int) -> GlooMail:
    store = dist.FileStore(str(path), size)
    return GlooMail(dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60)), rank, size)


@pytest.mark.parametrize("text", ["a0 b0", "a0 a0 b0", "a0 b0 a1 b0"])
def test_real_processes_have_one_hash_for_all_routes(text: str, tmp_path: Path) -> None:
    places = at(text)
    size, length = len(places), 300_000
    lanes, ragged = size + 2, (*singles(size - 1), (size - 1, size + 2))
    exact_routes, _ = candidates(places, exact=True)
    all_routes, _ = candidates(places, exact=False)

    def work(group: Any) -> list[dict[str, str]]:
        mail = gloo_mail(tmp_path / "store", group.rank, size)
        pool, base = TensorPool(), 0
        found: list[dict[str, str]] = [{}, {}, {}]
        for name, route in all_routes.items():
            for number, (options, count, deal) in enumerate(
                [
                    ({"ordered": name in exact_routes}, size, singles(size)),
                    ({"ordered": name in exact_routes}, lanes, ragged),
                    ({"ordered": False, "compress": {"host": Halves()}}, size, singles(size)),
                ]
            ):
                parts = held(count, deal[mail.rank], length)
                pieces = {span: split_pieces(route, part) for span, part in parts.items()}
                result = next(iter(parts.values()))
                given = TreeOptions(
                    lanes=count, assignment=deal, places=places, base=base, pool=pool, chunk_bytes=1 << 16, **options
                )
                relay = TreeExecutor(mail, route, pieces, split_pieces(route, result), given)
                base += relay.tags
                relay.wait()
                found[number][name] = tensor_sha256(result)
        return found

    first, *others = ranks(size, work)
    assert all(other == first for other in others), "the same bits on every rank"
    for number, count in ((0, size), (1, lanes)):
        expected = tensor_sha256(summed((0, count), length))
        assert {name: first[number][name] for name in exact_routes} == dict.fromkeys(exact_routes, expected)
