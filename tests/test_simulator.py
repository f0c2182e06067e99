"""What the simulator of xla_ffi/sim finds: xla_ffi/tests/micro.cu as it should be, and with one mistake in it."""

import os
import pathlib
import shutil
import subprocess

import pytest

COMPILER = shutil.which(os.environ.get("CXX", "c++"))
SOURCES = pathlib.Path(__file__).parents[1] / "xla_ffi"
FLAGS = [
  "-std=c++17",
  "-O1",
  "-fno-strict-aliasing",
  "-ffp-contract=off",
  "-Wno-psabi",
  "-DVSA_SIM",
]
FILES = (
  "sim/fiber.cc",
  "sim/machine.cc",
  "sim/memory.cc",
  "sim/hopper.cc",
  "sm90/tensor_map.cc",
  "tests/micro.cu",
)

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

WRONG, DEADLOCK = "results are wrong", "deadlock"
TOO_MANY = "more arrivals at an mbarrier"
# What any of these seeds may show, by mistake.
MISTAKES = {
  "no_wait_for_loads": (WRONG, TOO_MANY),
  "no_wait_for_products": (WRONG, "its matrix products are still running"),
  "no_wait_for_slots": (TOO_MANY, DEADLOCK, WRONG),
  "no_release": (DEADLOCK,),
  "wrong_parity": (DEADLOCK, TOO_MANY, WRONG),
  "arrives_twice": (TOO_MANY, DEADLOCK),
  "wrong_stride": (WRONG,),
  "wrong_swizzle": ("a matrix descriptor that is not modelled",),
  "lanes_apart": ("lanes apart: some are at",),
  "returns_early": (DEADLOCK,),
  "too_many_registers": (DEADLOCK, "waits for registers"),
  "misaligned_load": ("a TMA load at shared memory 64: want a multiple of 1024",),
  "no_wait_for_store": (WRONG, "TMA has still to read what it stores"),
  "too_few_bytes": (DEADLOCK, WRONG),
  "not_all_at_barrier": (DEADLOCK,),
}
SEEDS = range(8)


@pytest.fixture(scope="module")
def micro(tmp_path_factory):
  folder = tmp_path_factory.mktemp("micro")
  include = ["-I", str(SOURCES / "sim/include"), "-I", str(SOURCES.parent)]
  command = [COMPILER, *FLAGS, *include, "-x", "c++", *(str(SOURCES / f) for f in FILES)]
  subprocess.run([*command, "-o", str(folder / "micro")], check=True, timeout=300)

  def run(name, seed):
    done = subprocess.run(
      [str(folder / "micro"), name, str(seed)],
      capture_output=True,
      text=True,
      check=True,
      timeout=60,
    )
    return done.stdout

  return run


def test_right_under_any_schedule(micro):
  assert {micro("right", seed) for seed in range(60)} == {"right\n"}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found_under_any_schedule(micro, mistake):
  for seed in SEEDS:
    said = micro(mistake, seed)
    assert any(found in said for found in MISTAKES[mistake]), (seed, said)


def test_a_deadlock_says_who_waits_for_what(micro):
  assert "waits for registers" in micro("too_many_registers", 0)
  said = micro("no_release", 0)
  assert "warp 4 lane 0 waits for the mbarrier at " in said
  assert said.startswith("deadlock:\n  CTA 0 warp ")
