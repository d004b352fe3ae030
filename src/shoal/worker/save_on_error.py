"""What a run saves when an error ends it: the state after the last step that was applied whole.

    the error came                                     saved
    in the closure, the model, the data, the loss      yes: nothing of the step is applied
    because a loss is not finite                       yes: likewise
    between two batches, or after the last one         yes
    in an evaluation of a job                          yes: the step is applied; a resumed run evaluates it first
    in a callback                                      yes: likewise; the other callbacks have seen the step
    between run.backward and the end of the batch      no: the optimizer may have stepped, or not
    because weights differ among the workers           no: it is not known whose are right

A worker that holds the whole model writes the checkpoint by itself; where several fail at once, the first of them does.
Of a sharded model every writer writes its shard: the others hear of the error, and write theirs before they end.
"""

import time

from shoal.errors import CheckpointError, MismatchError, PeerLost
from shoal.worker.membership import RunAbandoned
from shoal.worker.run import Run

WAIT_SECONDS = 30.0  # for the shards of the other workers, or for the one worker that writes
POLL_SECONDS = 0.02


def save_on_error(run: Run, error: BaseException, reason: str) -> list[str]:
    """Saves what can be saved. `reason`: for the other workers, which end with this one. Returns lines for the user
    about what could not be saved; that a checkpoint was written its own event says."""
    if run.finished or not run.config.checkpoint.save_on_error or run.checkpoints.directory is None:
        return []
    if isinstance(error, MismatchError | CheckpointError):
        return []
    sharded, ends_with_another = run.layout.sharded, isinstance(error, RunAbandoned)
    if isinstance(error, PeerLost) and not (sharded and ends_with_another):  # the worker with the error saves
        return []
    step = run.applied_step
    if step is None:
        return [] if ends_with_another else [f"step {run.step} was being applied: it could not be saved"]
    if step == 0 or run.checkpoints.saved_step == step:
        return []
    if sharded and not run.membership.elastic:
        return [f"step {step} could not be saved: without a store the workers with the other shards hear of no error"]
    try:
        run.strategy.drop()  # lanes have changed buffers
        run.note_pending_stop()
        run.report()  # a resumed run does not report these steps again
        if sharded:
            return _save_shards(run, step, "" if ends_with_another else reason)
        if run.membership.claim_save(step):
            run.checkpoints.save_alone(step, run.progress())
            return []
        return _wait(run, step, "another worker began to write the checkpoint of step {step}, which is not there yet")
    except Exception as failure:  # the first error is what the user needs to see
        return [f"step {step} could not be saved: {type(failure).__name__}: {failure}".split("\n")[0]]


def _save_shards(run: Run, step: int, reason: str) -> list[str]:
    run.checkpoints.save(step, run.progress(), token=run.checkpoint_token(step))
    if reason:
        run.membership.fail_run(reason)
        run.group.abandon(reason)  # the others come out of their waits, hear of the error, and write their shards
    return _wait(run, step, "step {step} could not be saved: shards of other workers did not come in time")


def _wait(run: Run, step: int, otherwise: str) -> list[str]:
    """The first process to end takes the others with it: all stay until the checkpoint is in place."""
    directory, until = run.checkpoints.directory, time.monotonic() + WAIT_SECONDS
    assert directory is not None
    while time.monotonic() < until:
        if directory.of_step(step) is not None:
            return []
        time.sleep(POLL_SECONDS)
    return [otherwise.format(step=step)]
