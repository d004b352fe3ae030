"""Scripts as people write them on their first day (examples/first_day): each is run by the command, on 1 and 2."""

import importlib.util
import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import sklearn.datasets  # noqa: F401  (here, because it sets environment variables once, when it is loaded)

from helpers.command import Caller
from helpers.places import EXAMPLES
from shoal.worker.elastic_membership import LOG_ONLY


@dataclass(frozen=True, kw_only=True)
class FirstDay:
    script: str
    command: str  # {} is the script
    shows: tuple[str, ...]  # patterns of what is printed, in any order
    code: int = 0
    needs: str = ""  # a package


TABLE = (
    FirstDay(
        script="hf_padded.py",
        command="verify {} --workers 2 --steps 4 --against plain",
        shows=(r"2 workers +[0-9a-f]{64} +equal", r"plain PyTorch loop.*agrees after 4 steps"),
        needs="transformers",
    ),
    FirstDay(
        script="resnet_batchnorm.py",
        command="train {} --workers 2 --set steps=4",
        shows=("batch norm sees 16 of 64 samples: a lane", "exact: the same on any number of workers"),
    ),
    FirstDay(
        script="resnet_batchnorm.py",
        command="verify {} --workers 2 --steps 4",
        shows=(r"2 workers +[0-9a-f]{64} +equal",),
    ),
    FirstDay(
        script="compiled.py",
        command="verify {} --workers 1,2 --steps 6",  # the fifth batch is a short one
        shows=(r"2 workers +[0-9a-f]{64} +equal",),
    ),
    FirstDay(
        script="early_stopping.py",
        command="train {} --workers 2 --log csv",
        shows=(
            r"ended early stopping: no better loss in 3 evaluations; the best, 0\.\d+, was at step \d+",
            r"best accuracy 0\.9\d+ after step \d+: runs/\w+/checkpoints/step-\d+, best\.safetensors",
            r"gradient norm \d",
            r"ema\.safetensors",
            r"exact: the same on any number of workers",
        ),
    ),
    FirstDay(
        script="fp16_unfreeze.py",
        command="train {} --workers 2",
        shows=(
            r"53 steps, 2,000 samples",  # 3 passes of 13 batches, 2 of 7 updates
            r"loss scale [\d,]+; [1-9]\d* updates skipped, whose scaled gradients overflowed",
            r"val accuracy 0\.[6-9]",
            r"exact: the same on any number of workers",
        ),
    ),
    FirstDay(
        script="fp16_unfreeze.py",
        command="verify {} --workers 1,2 --steps 14 --resume --against plain",
        shows=(
            r"2 workers +[0-9a-f]{64} +equal",
            r"resumed on 1 [0-9a-f]{64} equal",
            r"plain PyTorch loop.*agrees after 14 steps",
        ),
    ),
    FirstDay(
        script="gan_job.py",
        command="verify {} --workers 2 --steps 6 --resume",
        shows=(r"2 workers +[0-9a-f]{64} +equal", r"resumed on 1 [0-9a-f]{64} equal"),
    ),
    FirstDay(
        script="early_stopping.py",
        command="verify {} --workers 1,2 --steps 46 --resume",
        shows=(r"2 workers +[0-9a-f]{64} +equal", r"resumed? .* equal"),
    ),
    FirstDay(
        script="resnet_batchnorm.py:synced",
        command="verify {} --workers 2,4 --shares 3,1 --steps 3 --against plain",
        shows=(
            r"2 workers +[0-9a-f]{64} +equal",
            r"4 workers +[0-9a-f]{64} +equal",
            r"shares 3,1 +[0-9a-f]{64} +equal",
            r"batch norm over the whole batch: agrees after 3 steps",
        ),
    ),
)


@pytest.mark.parametrize("case", TABLE, ids=lambda case: f"{case.script}-{case.command.split()[0]}")
@pytest.mark.filterwarnings("default")  # those of the packages that scripts import
def test_first_day(case: FirstDay, call: Caller) -> None:
    if case.needs and importlib.util.find_spec(case.needs) is None:
        pytest.skip(f"{case.needs} is missing")
    script = str(EXAMPLES / "first_day" / case.script)
    result = call(*(script if word == "{}" else word for word in case.command.split()))
    assert result.code == case.code, result.err
    printed = " ".join((result.out + result.err).split())
    for pattern in case.shows:
        assert re.search(pattern, printed), f"{pattern!r} is not in: {printed}"


@dataclass(frozen=True, kw_only=True)
class OwnLoop:
    """A script that joins: started on 1 and on 2 workers."""

    script: str
    shows: str  # a pattern of what its leader prints
    losses: tuple[str, ...] = ()  # the optimizers that metrics.jsonl has a loss of


LOOPS = (
    OwnLoop(script="gan.py", shows=r"discriminator \d\.\d+ generator \d\.\d+", losses=("d", "g")),
    OwnLoop(script="actor_critic.py", shows=r"9\d% of what the best levers bring", losses=("critic", "actor")),
    OwnLoop(script="ema.py", shows=r"average \d+\.\d+ of 40 updates"),
    OwnLoop(script="lora.py", shows=r"32% of the parameters trained, the rest unchanged"),
)


@pytest.mark.parametrize("case", LOOPS, ids=lambda case: case.script)
def test_own_loops_give_one_hash_on_one_and_two_workers(case: OwnLoop, call: Caller) -> None:
    script = EXAMPLES / "first_day" / case.script
    hashes, printed = set(), set()
    for workers in ("1", "2"):
        hashes.add(call.good("run", script, "--workers", workers, "--run-dir", workers, "--json").sha256)
        lines = Path(workers, "worker-0.log").read_text().splitlines()
        printed.add("\n".join(line for line in lines if not line.startswith(LOG_ONLY)))
    assert len(hashes) == 1
    assert len(printed) == 1, "what the leader prints is the same, to the last digit"
    assert re.search(case.shows, printed.pop())
    metrics = [json.loads(line) for line in Path("2", "metrics.jsonl").read_text().splitlines()]
    assert set(metrics[-1].get("losses", {})) == set(case.losses)
