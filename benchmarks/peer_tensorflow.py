"""TensorFlow's ParameterServerStrategy: a coordinator, one server, two workers, a step of its own. One line of JSON.

A step is a tf.function: a worker reads the variables from the server, and the server applies what it sends. Several
steps go into one call, as TensorFlow's guide advises for short ones: the coordinator would be the bottleneck. Run by
paramserver.py with the Python of `make bench-peers`.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import numpy as np
import tensorflow as tf

import pushes

STEPS = 32  # in one call


def one_thread() -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)


def addresses() -> dict[str, list[str]]:
    taken = [socket.socket() for _ in range(pushes.WORKERS + 1)]
    for each in taken:
        each.bind(("127.0.0.1", 0))
    found = [f"127.0.0.1:{each.getsockname()[1]}" for each in taken]
    for each in taken:
        each.close()
    return {"ps": found[:1], "worker": found[1:]}


def serve(cluster: dict[str, list[str]], job: str, index: int) -> None:
    """A server or a worker: it does what the coordinator says until it is killed."""
    pushes.end_with_parent()
    one_thread()
    tf.distribute.Server(tf.train.ClusterSpec(cluster), job_name=job, task_index=index, protocol="grpc").join()


def several(step: Callable[[Any], tf.Tensor], strategy: Any) -> Any:
    """Steps in one call; what they read is added up, so that none is left out."""

    @tf.function
    def call(iterator: Any) -> Any:
        def work(iterator: Any) -> Any:
            total = tf.constant(0.0)
            for _ in tf.range(STEPS):
                total += step(next(iterator))
            return total

        return strategy.run(work, args=(iterator,))

    return call


def mlp_case(strategy: Any) -> Any:
    with strategy.scope():
        first = pushes.mlp_values()
        weight, bias, weight2, bias2 = parts = [tf.Variable(value) for value in first.values()]

    def step(batch: Any) -> Any:
        x, y = batch
        with tf.GradientTape() as tape:
            hidden = tf.nn.relu(tf.matmul(x, weight, transpose_b=True) + bias)
            output = tf.matmul(hidden, weight2, transpose_b=True) + bias2
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, output))
        for part, gradient in zip(parts, tape.gradient(loss, parts), strict=True):
            part.assign_sub(pushes.LEARNING_RATE * gradient)
        return loss

    def data() -> Any:
        x, y = (np.stack(each) for each in zip(*pushes.batches(0), strict=True))
        return tf.data.Dataset.from_tensor_slices((x, y)).cache().repeat()

    return step, data, parts


def fixed_case(strategy: Any) -> Any:
    with strategy.scope():
        parts = [tf.Variable(tf.zeros(shape)) for shape in pushes.SHAPES.values()]

    def step(gradients: Any) -> Any:
        for part, gradient in zip(parts, gradients, strict=True):
            part.assign_sub(gradient)
        return tf.add_n([tf.reshape(part.read_value(), [-1])[0] for part in parts])  # the values come to the worker

    def data() -> Any:
        # The rate is in it: one operation less for the worker.
        return (
            tf.data.Dataset.from_tensors(tuple(tf.fill(shape, pushes.STEP) for shape in pushes.SHAPES.values()))
            .cache()
            .repeat()
        )

    return step, data, parts


def sparse_case(strategy: Any) -> Any:
    with strategy.scope():
        table = tf.Variable(tf.zeros((pushes.ROWS, pushes.DIM)))

    def step(batch: Any) -> Any:
        rows, gradients = batch
        found = tf.nn.embedding_lookup(table, rows)
        table.scatter_sub(tf.IndexedSlices(gradients, rows))
        return found[0, 0]

    def data() -> Any:
        rows = tf.data.Dataset.from_tensor_slices(np.stack(pushes.lookups(0)))
        gradients = tf.data.Dataset.from_tensors(tf.fill((pushes.LOOKUPS, pushes.DIM), pushes.STEP)).cache().repeat()
        return tf.data.Dataset.zip((rows.cache().repeat(), gradients))

    return step, data, [table]


CASES = {"mlp": mlp_case, "fixed": fixed_case, "sparse": sparse_case}


def measure(case: str, strategy: Any, coordinator: Any, warm_up: float, seconds: float) -> tuple[float, float]:
    """Updates a second, and the share of them that the server's values show."""
    step, data, parts = CASES[case](strategy)
    call = several(step, strategy)
    iterator = iter(coordinator.create_per_worker_dataset(data))
    done = 0

    def run(calls: int) -> float:
        nonlocal done
        began = time.monotonic()
        for _ in range(calls):
            coordinator.schedule(call, args=(iterator,))
        coordinator.join()
        done += calls
        return time.monotonic() - began

    run(2 * pushes.WORKERS)  # traces
    each = run(2 * pushes.WORKERS) / (2 * pushes.WORKERS)
    each = run(calls := max(pushes.WORKERS, round(warm_up / each))) / calls
    calls = max(pushes.WORKERS, round(seconds / each))
    rate = STEPS * calls / run(calls)
    if case == "mlp":
        return rate, 1.0
    moved = -float(tf.reduce_sum(tf.cast(parts[0][..., :1], tf.float64)).numpy()) / pushes.STEP
    rows = parts[0].shape[0] if case == "fixed" else pushes.LOOKUPS
    return rate, moved / rows / STEPS / done


def main() -> None:
    asked = pushes.options("TensorFlow's ParameterServerStrategy")
    cluster = addresses()
    started = [
        subprocess.Popen([sys.executable, __file__, "serve", json.dumps(cluster), job, str(index)])
        for job, tasks in cluster.items()
        for index in range(len(tasks))
    ]
    try:
        one_thread()
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(cluster | {"chief": ["127.0.0.1:0"]}), task_type="chief", task_id=0, rpc_layer="grpc"
        )
        strategy = tf.distribute.ParameterServerStrategy(resolver)
        coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        found = {case: measure(case, strategy, coordinator, asked.warm_up, asked.seconds) for case in asked.only}
        rates = {case: rate * (pushes.LOOKUPS if case == "sparse" else 1) for case, (rate, _) in found.items()}
        applied = {case: share for case, (_, share) in found.items() if case != "mlp"}
        pushes.say("tensorflow", tf.__version__, rates, applied)
    finally:
        for each in started:
            each.kill()
        for each in started:
            each.wait()
    sys.stdout.flush()
    os._exit(0)  # the coordinator's threads would wait for workers that are gone


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(json.loads(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    else:
        main()
