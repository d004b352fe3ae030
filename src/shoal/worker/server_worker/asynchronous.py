"""A worker's loop with a queue of steps: async, stale and groups. Whoever is free takes the next step, all of it.

    Next at shard 0 ─► compute the whole batch ─► Push to every shard, values come back ─► Next …
                 └► an errand: evaluate, save, write the result                    └► the run is over

In groups the members of one compute a batch together, by collectives; the first of them pushes, and hands the new
values to the others.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from shoal.collectives.group import Alone, Group, Workers
from shoal.errors import PeerLost, RunError
from shoal.numerics.grad_norm import clip
from shoal.numerics.lanes import deal, redeal
from shoal.parallel.data_parallel import Outcome, Work
from shoal.parallel.groups import Teams
from shoal.paramserver.messages import Compute, End, Ended, Errand, Next, Push, Put
from shoal.paramserver.reduce import Rows
from shoal.paramserver.step_coordinator import EVALUATE, FINISH, SAVE
from shoal.worker.server_worker.base import Served
from shoal.worker.trainer import REDEAL_STEPS, SLOW

FORMING = timedelta(seconds=10)  # for the members of a group to meet


class Queueing(Served):
    wrote = False  # the result
    asked = -1  # the step whose rows were asked for last

    def run(self) -> None:
        self.enter()
        self.pull()
        self.strategy.join(Teams.equal(Alone()), [(0, self.plan.lanes)])
        self.leads = True  # of the steps that it does
        ask = self.next()
        while True:
            self.journal.begin()
            reply, _ = self.client.request(0, ask).wait()
            ask = self.next()
            match reply:
                case Compute():
                    ask = self.ticket(reply)
                case Errand(what, done):
                    self.errand(what, done)
                case End():
                    break
        self.end(reply)

    def next(self, *, done: int = -1, failed: int = -1) -> Next:
        return Next(self.mode.group_of(self.worker), done=done, failed=failed, ahead=self.prefetches)

    def ticket(self, given: Compute) -> Next:
        """One step of the job. Returns what to ask next."""
        work, indices = self.work(given.ticket)
        self.look_ahead(given)
        outcome = self.compute(work)
        done = given.done + 1
        if self.check_finite(given.ticket, outcome):
            outcome = self.push(given.ticket, outcome)
        self.journal.merged(outcome)
        self.committed(done, outcome, indices, [self.worker])
        self.look_around(done)
        return self.next(done=given.ticket)

    def look_ahead(self, given: Compute) -> None:
        """Asks for the rows of the step that comes after this one: they are here when it begins, older by one step."""
        if self.asked != given.ticket:
            self.prefetch(given.ticket)
        if given.then >= 0:
            self.prefetch(given.then, beside=True)
        self.asked = given.then

    def look_around(self, done: int) -> None:
        after = self.settings.stop_after
        if self.seat.wire.asked_to_stop():
            self.client.request(0, Ended("asked to stop", True)).wait()
        elif after is not None and done >= after:
            self.client.request(0, Ended(f"stop after step {after}", True)).wait()

    def compute(self, work: Work) -> Outcome:
        """The whole batch's gradient, here."""
        sums = self.strategy.sums(work, self.objective)
        alone = self.strategy.agree(work, sums, {0: sums.row})
        (span,) = sums.parts
        names = [name for name, _ in self.replica.parameters]
        values = sums.parts[span][: len(names)]
        self.gradients: dict[str, Tensor | None] = {
            name: None if value is None else value.mul_(alone.scale) if alone.scale != 1.0 else value
            for name, value in zip(names, values, strict=True)
        }
        self.sparse: Sequence[Rows | None] = [
            None if rows is None else Rows(rows.ids, rows.rows * alone.scale) for rows in sums.sparse[span]
        ]
        if self.buffers is not None and not alone.outcome.not_finite:
            self.strategy.commit_buffers(self.strategy.shares(sums), alone)
        return alone.outcome

    def push(self, ticket: int, outcome: Outcome) -> Outcome:
        """One update, on every shard; the new values are here afterwards."""
        began = time.perf_counter()
        if self.job.clip_norm is not None:
            dense = [value for value in self.gradients.values() if value is not None]
            clip([*dense, *(rows.rows for rows in self.sparse if rows is not None)], self.job.clip_norm)
        futures, puts = [], []
        for shard in range(self.plan.servers):
            slots, tensors = self.gradient_slots(shard, self.gradients, self.sparse)
            request = Push(slots, ticket=ticket, basis=self.versions[shard], pull=True)
            futures.append(self.client.request(shard, request, tensors))
            packed = self.buffers.pack(shard, self._buffer_values()) if self.buffers is not None else None
            if packed is not None:
                puts.append(self.client.request(shard, Put([packed[0]]), packed[1]))
        for shard, future in enumerate(futures):
            reply, tensors = future.wait()
            self.versions[shard] = reply.version
            self.take(shard, tensors)
        for put in puts:
            put.wait()
        self.built.update.after()
        return replace(outcome, merge_seconds=outcome.merge_seconds + time.perf_counter() - began)

    # -- errands ------------------------------------------------------------------------------------------------------

    def errand(self, what: str, done: int) -> None:
        self.pull()
        if what == EVALUATE and self.evaluate(done):
            self.client.request(0, Ended(f"target {self.job.target} reached")).wait()
        elif what == SAVE and self.saving.rested:
            self.tell(done)
            self.save(*self.standing_steps())
        elif what == FINISH:
            self.write_result(*self.standing_steps())
            self.wrote = True

    def standing_steps(self) -> tuple[int, list[int]]:
        """So many are done: all but some below these."""
        values: dict[str, Any] = self.standings()[0].values
        return values["done"], list(values["above"])

    def begin_at(self, above: Sequence[int]) -> tuple[int, Sequence[int]]:
        return self.resumed_step - len(above), above

    def end(self, reply: End) -> None:
        self.pull()
        self.tell(reply.done)
        self.stopped, self.resumable = reply.reason or None, reply.resumable
        self.leads = self.wrote
        self.finish(reply.done)


class Grouped(Queueing):
    """A member of a group. Inside it a slow member is given fewer lanes, as in a run without servers."""

    group: Group = Alone()
    epoch = -1
    watched: list[list[float]]  # seconds of every member, by step

    def ticket(self, given: Compute) -> Next:
        try:
            self.form(given)
            return super().ticket(given)
        except PeerLost:
            self.group.close()
            self.epoch = -1
            self.strategy.drop()
            return self.next(failed=given.epoch)

    def form(self, given: Compute) -> None:
        """The group of these members, and all of them have the first one's values."""
        if given.epoch == self.epoch:
            return
        self.group.close()
        members = list(given.members)
        leads = members[0] == self.worker
        if leads != self.leads:
            self.tell(given.done)  # of what was done in the other part
        self.leads = leads
        if len(members) == 1:
            self.group = Alone(self.settings.wish)
        else:
            assert self.seat.store is not None
            number = self.mode.group_of(self.worker)
            store = PrefixStore(f"group/{number}/{given.epoch}", self.seat.store())
            try:
                self.group = Workers(
                    store,
                    rank=members.index(self.worker),
                    size=len(members),
                    timeout=self.settings.timeout,
                    wish=self.settings.wish,
                    forming=FORMING,
                )
            except RunError as error:
                raise PeerLost(error.message) from error
        self.epoch, self.watched = given.epoch, []
        self.strategy.join(Teams.equal(self.group), deal(self.plan.lanes, [1.0] * len(members)))
        self.spread()

    def compute(self, work: Work) -> Outcome:
        self.strategy.compute(work, self.objective)
        outcome = self.strategy.finish(self.strategy.meet())
        self.watch(outcome.compute)
        self.gradients = {name: parameter.grad for name, parameter in self.replica.parameters}
        self.sparse = self.strategy.rows_together()
        return outcome

    def push(self, ticket: int, outcome: Outcome) -> Outcome:
        began = time.perf_counter()
        if self.leads:
            outcome = super().push(ticket, outcome)
        self.spread()
        return replace(outcome, merge_seconds=outcome.merge_seconds + time.perf_counter() - began)

    def watch(self, seconds: list[float]) -> None:
        """Everyone has the same numbers, so everyone comes to the same deal."""
        if self.group.size == 1 or self.settings.slow == "ignore" or self.plan.shares not in ("even", "auto"):
            return
        self.watched.append(seconds)
        if len(self.watched) >= REDEAL_STEPS:
            typical = [sorted(times)[len(times) // 2] for times in zip(*self.watched, strict=True)]
            self.watched = []
            decision = redeal(self.strategy.deal, typical, worth=SLOW)
            if decision is not None:
                self.strategy.join(self.strategy.teams, decision[0])

    def spread(self) -> None:
        """The first member's weights, to all."""
        if self.group.size > 1:
            for value in self.values.values():
                self.group.broadcast(value)
            self.built.update.after()
