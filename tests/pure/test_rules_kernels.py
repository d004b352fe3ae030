"""Rules of arithmetic, one by one: MKL's mode, fingerprints, threads, bf16, torch.compile.

What each demands, and that the nearest thing to it gives other bits. The numbers are those of docs/exact.md; the whole
of it through real workers is in tests/runs/test_same_bits.py.
"""

import pytest
import torch

import shoal
from helpers.steps import generator_states
from shoal.errors import InputError
from shoal.numerics import kernels
from shoal.testing import dropout_net, job_for

pytestmark = pytest.mark.usefixtures("generators_stay")


# -- 8: the fingerprint -----------------------------------------------------------------------------------------------


def test_8_taking_a_fingerprint_changes_nothing() -> None:
    before = generator_states()
    assert kernels.traits() == kernels.traits()
    assert generator_states() == before


def test_8_a_pinned_instruction_set_must_be_in_force() -> None:
    with pytest.raises(InputError, match="isa='avx2' must be in force before the first kernel"):
        shoal.train(job_for(dropout_net, isa="avx2"), workers=1, quiet=True)


# -- 9: threads and deterministic kernels -----------------------------------------------------------------------------


def test_9_settling_fixes_threads_and_deterministic_kernels() -> None:
    kernels.configure(threads=2)
    assert torch.get_num_threads() == 2
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory is False  # type: ignore[attr-defined]
