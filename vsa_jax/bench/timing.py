"""How long calls take: on a CPU in turn, round after round; on a GPU under a sustained and a burst protocol.

A GPU at its power limit lowers its clock within milliseconds, so the same kernel is faster in a burst than
back to back.  Compare sustained with sustained, of one run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

Calls = dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]


@dataclasses.dataclass(frozen=True)
class Times:
  """Milliseconds of one call; on a GPU also of a burst, and the board's clock and power meanwhile."""

  ms: float  # the median; on a GPU, sustained
  quartiles_ms: tuple[float, float]
  burst_ms: float | None = None
  sm_mhz: float | None = None
  watts: float | None = None


def in_turn(calls: Calls, rounds: int) -> dict[str, Times]:
  """Wall clock of finished calls, one after the other in every round."""
  times: dict[str, list[float]] = {name: [] for name in calls}
  for _ in range(rounds):
    for name, (function, args) in calls.items():
      # Untimed first: it compiles, and what ran before (dense attention's gigabytes) leaves memory cold.
      jax.block_until_ready(function(*args))
      times[name].append(_milliseconds(function, args, 1))
  return {name: _times(t) for name, t in times.items()}


def sustained(calls: Calls, rounds: int, seconds: float = 1.2) -> dict[str, Times]:
  """For each call: the second half of `seconds` of back-to-back calls, in `rounds` rounds; and bursts.

  A burst is about 2 ms of calls, at least one, after 0.4 s of rest and 3 untimed calls; 7 of them.
  """
  times: dict[str, list[float]] = {name: [] for name in calls}
  boards: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
  for _ in range(rounds):
    for name, (function, args) in calls.items():
      jax.block_until_ready(function(*args))
      once = _milliseconds(function, args, 1)
      count = max(
        2, int(50 / once)
      )  # between two waits of the host: they cost a tenth of a millisecond
      block: list[float] = []
      with _board() as readings:
        start = time.perf_counter()
        while time.perf_counter() - start < seconds:
          block.append(_milliseconds(function, args, count))
      times[name] += block[len(block) // 2 :]
      boards[name] += readings[len(readings) // 2 :]
  found = {}
  for name, (function, args) in calls.items():
    bursts = []
    for _ in range(7):
      time.sleep(0.4)
      _milliseconds(function, args, 3)
      bursts.append(_milliseconds(function, args, max(1, int(2 / times[name][-1]))))
    found[name] = dataclasses.replace(_times(times[name]), burst_ms=float(np.median(bursts)))
    if boards[name]:
      mhz, watts = np.median(np.array(boards[name]), axis=0)
      found[name] = dataclasses.replace(found[name], sm_mhz=float(mhz), watts=float(watts))
  return found


def _milliseconds(function: Callable[..., Any], args: tuple[Any, ...], count: int) -> float:
  start = time.perf_counter()
  for _ in range(count):
    made = function(*args)
  jax.block_until_ready(made)
  return 1e3 * (time.perf_counter() - start) / count


def _times(samples: list[float]) -> Times:
  low, median, high = np.percentile(samples, (25, 50, 75))
  return Times(float(median), (float(low), float(high)))


@contextlib.contextmanager
def _board() -> Iterator[list[tuple[float, float]]]:
  """Fills, on leaving, a list with (SM clock in MHz, watts) every 50 ms, where nvidia-smi is."""
  readings: list[tuple[float, float]] = []
  command = "nvidia-smi --query-gpu=clocks.sm,power.draw --format=csv,noheader,nounits -lms 50 -i 0"
  try:
    process = subprocess.Popen(command.split(), stdout=subprocess.PIPE, text=True)
  except OSError:
    yield readings
    return
  try:
    yield readings
  finally:
    process.terminate()
    text, _ = process.communicate()
    for line in text.splitlines():
      with contextlib.suppress(ValueError):  # the last line may be cut short
        mhz, watts = map(float, line.split(","))
        readings.append((mhz, watts))
