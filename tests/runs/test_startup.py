"""What a new process imports: torch only where it is needed, and `import shoal` registers the backend."""

import subprocess
import sys

import pytest

import shoal

SHAPE = ["--gpt", "layers=4,hidden=64,heads=4,seq=32,vocab=100"]
LIGHT = [
    *([*words.split()] for words in ("--version", "--help", "train --help", "run --help", "report --help", "runs")),
    *([*words.split()] for words in ("schedule 1f1b", "cluster show", "trian", "train job.py --wokers 2")),
    ["estimate", *SHAPE],
    ["plan", *SHAPE, "--batch", "8", "--cluster", "dgx-a100"],
    ["simulate", *SHAPE, "--batch", "8", "--layout", "data=2", "--cluster", "dgx-a100"],
]
COMMANDS = f"""
import sys
from shoal.cli.main import main
for words in {LIGHT}:
    try:
        main(words)
    except SystemExit:
        pass
    assert "torch" not in sys.modules, words
print("light")
"""
REGISTERED = "import torch.distributed as dist; assert 'shoal' in dist.Backend.backend_list; print('registered')"


def python(code: str) -> str:
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_help_mistakes_and_plans_of_shapes_do_without_torch() -> None:
    assert python(COMMANDS).rstrip().endswith("light")


@pytest.mark.parametrize("first", ["import shoal", "import torch; import shoal", "import shoal, torch; shoal.Job"])
def test_the_backend_is_registered_whatever_is_imported_first(first: str) -> None:
    left = "import sys; assert not [one for one in sys.meta_path if 'shoal' in type(one).__module__]"
    assert "registered" in python(f"{first}\n{REGISTERED}\n{left}")


def test_every_public_name_is_there_and_an_unknown_one_is_not() -> None:
    assert all(getattr(shoal, name) is not None for name in shoal.__all__)
    assert set(shoal.__all__) <= set(dir(shoal))
    assert shoal.testing.__name__ == "shoal.testing"  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="no attribute 'Jobb'"):
        shoal.Jobb  # noqa: B018
