"""The bug reports of the field as tests.  A test's name holds the id of its report.

Every test that takes the fixture `implementation` runs once for each name of RUN_HERE.  Reports that
speak of a GPU are here at a size that a CPU can run, wherever the kind of fault can show there.
"""

import pytest
from running import RUN_HERE

# Reports that no CPU test can show, and why.
NOT_ON_CPU = {
  "D05": "a compiler fault of one GPU tuning choice: needs a GPU and the tuning table",
  "I01": "offsets past 2**31 elements: needs 80 GB of GPU memory",
  "I06": "capture of kernel launches in a CUDA graph: needs a GPU",
  "J08": "speed against dense attention: a measurement (python -m vsa_jax bench), not a test",
  "L02": "build with an old host compiler: needs that compiler",
  "L05": "glibc and Python range of wheels: needs the built wheels",
}


@pytest.fixture(params=RUN_HERE)
def implementation(request):
  """The name of an implementation."""
  return request.param


@pytest.fixture
def not_on_cpu():
  """The table NOT_ON_CPU."""
  return NOT_ON_CPU
