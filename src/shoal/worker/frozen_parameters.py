"""Freezes and frees parameters by step, as a job says it (job/freeze.py): autograd then makes no gradient for them.

A frozen parameter has no gradient at all, rather than one of zeros: no momentum, no weight decay, no traffic. What
depends on which parameters are trained follows by itself (`LaneStrategy._open_exchange`), or is told by `apply`.
"""

from collections.abc import Mapping

from shoal.errors import JobError
from shoal.job.freeze import active_patterns, check_names, is_frozen
from shoal.parallel.lane_buffers import owner_of
from shoal.parallel.replica import ModelReplica


class FrozenParameters:
    def __init__(self, freeze: Mapping[str, int | None], replica: ModelReplica) -> None:
        """`replica`: whole, or what this worker has of it. The names are those of the whole model on all workers."""
        self.freeze, self.model = freeze, replica.model
        held = dict(replica.parameters)
        by_tensor: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            by_tensor.setdefault(id(parameter), []).append(name)

        def all_names(name: str) -> tuple[str, ...]:
            """A tied parameter has several, and a leaf in each block that uses it."""
            leaves = replica.leaves(name, held[name]) if name in held else (self.model.get_parameter(name),)
            return tuple(known for leaf in leaves for known in by_tensor[id(leaf)])

        self.names = {name: all_names(name) for name in replica.parameter_order}
        # The model's own code may have frozen some for good.
        self.trainable = {name for name in self.names if name in held and held[name].requires_grad}
        self._active: tuple[str, ...] | None = None
        check_names(freeze, [known for names in self.names.values() for known in names])
        for step in sorted({0, *(until for until in freeze.values() if until is not None)}):
            if all(is_frozen(active_patterns(freeze, step), names) for names in self.names.values()):
                raise JobError(f"freeze leaves no parameter to train at step {step}", fix="fewer or narrower names")

    def apply(self, step: int) -> bool:
        """Freezes what is frozen at a step, and nothing else. True: that is not what it was before."""
        active = active_patterns(self.freeze, step)
        if active == self._active:
            return False
        self._active = active
        for name in self.trainable:
            trained = not is_frozen(active, self.names[name])
            for known in self.names[name]:
                module, leaf = owner_of(self.model, known)
                parameter = module._parameters[leaf]  # sharded strategies put another one in its place
                assert parameter is not None
                parameter.requires_grad_(trained)
        return True
