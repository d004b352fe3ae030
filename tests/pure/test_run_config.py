"""One configuration: flags, Python and config.json agree, and mistakes are refused where they are made."""

import argparse
from pathlib import Path
from typing import Any

import msgspec
import pytest

import shoal
from helpers.command import Caller, refused, write_job
from shoal.cli.main import build_parser, parse
from shoal.cli.options import run_config_of
from shoal.driver.make_plan import plan_for
from shoal.errors import InputError, PlanError, RunFolderError
from shoal.job.load import load_job
from shoal.parallel.layout import ParallelLayout
from shoal.parallel.plan import VERSION, make_plan, read_plan
from shoal.report.run_folder import FORMAT, RunFolder, find_run
from shoal.worker.run_config import GROUPS, RunConfig, config_fields

FLAT = {each.flat_name: each for each in config_fields()}
# Flags of `train` that name a field together with others, and those that are not about the run.
STAND_FOR = {"data": "layout", "pipeline": "layout", "tensor": "layout", "zero": "layout", "checkpoint": "auto"}
OF_THE_COMMAND = {"help", "help-all", "set", "dry-run", "json"}


def flags(command: str) -> dict[str, argparse.Action]:
    """All flags of a command, those of `--help-all` too, without dashes."""
    (commands,) = (each for each in build_parser()._actions if isinstance(each, argparse._SubParsersAction))
    actions = commands.choices[command]._actions
    return {
        name.lstrip("-"): each
        for each in actions
        for name in each.option_strings
        if name.startswith("--") and not name.startswith("--no-")  # the same field, off
    }


def given(*words: str) -> RunConfig:
    return run_config_of(parse(["train", "job.py", *words]))


# -- fields and flags -------------------------------------------------------------------------------------------------


def test_a_field_that_is_on_can_be_turned_off() -> None:
    assert given().checkpoint.save_on_error
    assert not given("--no-save-on-error").checkpoint.save_on_error


def test_every_flag_of_a_run_has_a_field() -> None:
    found = set(flags("train")) - OF_THE_COMMAND
    assert found - set(STAND_FOR) == {each.flag for each in config_fields() if each.flag is not None}
    assert set(STAND_FOR) <= found and set(STAND_FOR.values()) <= set(FLAT)
    assert set(flags("run")) <= set(flags("train"))


def test_every_field_has_a_name_of_its_own_and_a_sentence() -> None:
    names = [each.flat_name for each in config_fields()]
    assert len(set(names)) == len(names)
    assert not {name for name in names if name in GROUPS} - {"servers"}, "a group and its field are told apart by type"
    for each in config_fields():
        assert len(each.text) > 15 and not each.text.endswith("."), each.name
    for name, group in GROUPS.items():
        assert group.__name__.lower() == name and getattr(shoal, group.__name__) is group


def test_help_has_the_field_s_own_sentence() -> None:
    shown = flags("train")
    for each in config_fields():
        if each.flag is not None:
            action = shown[each.flag]
            assert each.text in (action.help, getattr(action, "full_help", None))


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        (["--workers", "4", "--lease", "2"], {"workers": 4, "lease": 2.0}),
        (["--pipeline", "2", "--zero", "1"], {"layout": "pipeline=2,zero=1"}),
        (["--checkpoint", "auto"], {"checkpoint": "auto"}),
        (["--checkpoint", "5"], {"checkpoint_every": 5}),
        (["--on-failure", "shrink", "--lease", "3"], {"failure": shoal.Failure(on_failure="shrink", lease=3.0)}),
        (["--servers", "2", "--sync", "stale:3"], {"servers": shoal.Servers(count=2, sync="stale:3")}),
        (["--memory", "250MB", "--inexact", "--pin"], {"memory": "250MB", "inexact": True, "pin": True}),
        (["--resume"], {"resume": True}),
        (["--resume", "7f3a", "--timeout", "60"], {"resume": "7f3a", "timeout": 60.0}),
        (["--calibrate", "a", "b"], {"calibrate": ["a", Path("b")]}),
        (["--run-dir", "x", "-q"], {"run_dir": Path("x"), "quiet": True}),
    ],
)  # fmt: skip
def test_flags_and_python_say_the_same(words: list[str], fields: dict[str, Any]) -> None:
    assert given(*words) == RunConfig().changed(detached=True, listed=True, **fields) != given()


def test_flags_that_are_not_given_change_nothing() -> None:
    assert given() == RunConfig().changed(detached=True, listed=True)


# -- groups and flat names --------------------------------------------------------------------------------------------


def test_groups_and_single_fields_go_together() -> None:
    base = RunConfig(failure=shoal.Failure(lease=2.0))
    found = base.changed(servers=shoal.Servers(count=1), slow="evict", workers=3)
    assert found.failure == shoal.Failure(lease=2.0, slow="evict")
    assert (found.servers.count, found.parallel.workers) == (1, 3)
    assert found.changed(servers=2).servers.count == 2
    assert found.changed(failure=shoal.Failure()).failure.lease == 5.0
    assert RunConfig().changed(checkpoint=shoal.Checkpoint(every=7)) == RunConfig().changed(checkpoint=7)


def test_a_configuration_cannot_be_changed_in_place() -> None:
    with pytest.raises(AttributeError):
        RunConfig().parallel = shoal.Parallel()  # type: ignore[misc]
    with pytest.raises(AttributeError):
        RunConfig().failure.lease = 1.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        shoal.Parallel(4)  # type: ignore[misc]


def test_a_configuration_comes_back_from_json() -> None:
    plan = make_plan(lanes=8, workers=2)
    for config in (
        RunConfig(),
        RunConfig().changed(plan=plan, links={"host": (1e-4, 1e9)}, calibrate=["a"], run_dir=Path("x"), resume="7f3a"),
        RunConfig().changed(layout=ParallelLayout(data=2, pipeline=2), memory=10**9, resume=True, checkpoint="auto"),
    ):
        assert msgspec.json.decode(msgspec.json.encode(config), type=RunConfig) == config


def test_workers_beyond_a_layout_are_copies() -> None:
    assert RunConfig().changed(workers=4, layout="pipeline=2").parallel.parallel_layout == ParallelLayout(
        data=2, pipeline=2
    )
    assert RunConfig().changed(workers=3, layout="pipeline=2").parallel.parallel_layout == ParallelLayout(pipeline=2)


# -- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message", "fix"),
    [
        ({"leese": 2.0}, "leese is not a field of RunConfig", "did you mean lease?"),
        ({"something": 1}, "something is not a field of RunConfig", "one of accept, algorithm, "),
        ({"on_failure": "retry"}, "on_failure='retry' is not known", "'replace', 'shrink', 'stop'"),
        ({"workers": 0}, "0 workers: at least 1 is needed", "--workers 1"),
        ({"workers": "4"}, "workers='4' is no number", "workers=1"),
        ({"stop_after": 0}, "--stop-after 0: a number from 1 up", None),
        ({"checkpoint_every": -1}, "--checkpoint-every -1: a number from 1 up", None),
        ({"checkpoint": "often"}, "--checkpoint often: auto, or a number of steps from 1 up", None),
        ({"checkpoint": 5, "checkpoint_every": 6}, "--checkpoint 5 and --checkpoint-every 6: one of them", None),
        ({"lease": 0.0}, "--lease 0.0: seconds above 0", None),
        ({"timeout": -1.0}, "--timeout -1.0: seconds above 0", None),
        ({"servers": 300}, "--servers 300: a number from 0 to 256", "--servers 2"),
        ({"sync": "stail:3"}, "there is no mode 'stail'", "did you mean stale?"),
        ({"compress": "int9"}, "there is no compressor 'int9'", "did you mean int8?"),
        ({"memory": "lots"}, "'lots' is no amount of memory", "such as 250MB"),
        ({"layout": "pipline=2"}, "'pipline' is not known", "--layout data=2"),
        ({"schedule": "1f2b"}, "1f2b", None),
        ({"min_workers": 3, "max_workers": 2}, "--min-workers 3 is above --max-workers 2", "--min-workers 1"),
        ({"plan": "auto", "layout": "data=2"}, "--plan auto and a layout: the planner chooses one", "one of them"),
        ({"plan": "auto", "shares": "3,1"}, "--plan auto and --shares 3,1", "one of them"),
        ({"plan": "nowhere.json"}, "the plan nowhere.json cannot be read", None),
    ],
)
def test_a_mistake_is_refused_where_it_is_made(fields: dict[str, Any], message: str, fix: str | None) -> None:
    with pytest.raises(InputError) as caught:
        RunConfig().changed(**fields)
    assert message in caught.value.message
    assert fix is None or fix in (caught.value.fix or "")


def test_flags_that_contradict_are_refused(call: Caller, tmp_path: Path) -> None:
    write_job(tmp_path)
    assert "--layout data=2 and --zero" in refused(call, "train", "job.py", "--layout", "data=2", "--zero", "1")
    assert "--plan auto and a layout" in refused(call, "train", "job.py", "--plan", "auto", "--tensor", "2")


# -- what an older version has written --------------------------------------------------------------------------------


def test_a_run_folder_of_the_version_before_is_refused(call: Caller, tmp_path: Path) -> None:
    write_job(tmp_path)
    old = tmp_path / "runs" / "7f3a"
    old.mkdir(parents=True)
    (old / "config.json").write_text('{"job": {}, "arithmetic": {}}')
    (old / "events.jsonl").write_text('{"event": "started", "time": 1.0}\n')
    for words in (["report", "7f3a"], ["why"], ["train", "job.py", "--resume", "runs/7f3a"]):
        told = refused(call, *words)
        assert told.startswith("runs/7f3a was written by Shoal 0.1, which named its events differently\n")
        assert "fix: read it with shoal==0.1.0, or train again; its weights are in runs/7f3a/model.safetensors" in told
    assert call("runs").code == 0, "a list shows what it can"


def test_a_run_folder_of_a_later_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"format": 99}')
    with pytest.raises(RunFolderError, match=f"has format 99, and this Shoal reads format {FORMAT}"):
        RunFolder.open(tmp_path)
    (tmp_path / "config.json").write_text(f'{{"format": {FORMAT}}}')
    assert find_run(str(tmp_path)).path == tmp_path


def test_a_plan_of_the_version_before_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"workers": 1, "lanes": 4, "deal": [[0, 4]], "version": 1}')
    with pytest.raises(PlanError, match=r"plan\.json was written by Shoal 0\.1") as caught:
        read_plan(path)
    assert "shoal plan FILE -o plan.json" in (caught.value.fix or "")
    path.write_bytes(msgspec.json.encode(make_plan(lanes=4, workers=2)))
    assert read_plan(path).version == VERSION == 2
    write_job(tmp_path)
    assert plan_for(load_job(str(tmp_path / "job.py")), RunConfig().changed(plan=path)).workers == 2
