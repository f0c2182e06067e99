"""python -m vsa_jax [demo | tour | info | bench]."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import platform
import sys

# Each is a module with a main(argv), imported only when asked for: the demo needs packages that the
# library does not.
_COMMANDS = {
  "demo": (
    "vsa_jax.demo",
    "train a small video DiT on a clip and compare dense and sparse attention",
  ),
  "tour": ("vsa_jax.tour", "Video Sparse Attention in two screens, computed as you read"),
  "info": (
    "vsa_jax.__main__",
    "versions, devices, and which implementations run here, and why not",
  ),
  "bench": ("vsa_jax.bench", "time the op on named real shapes"),
}


def main(argv: list[str] | None = None) -> int:
  """Runs a command; returns the exit status (2: a wrong call)."""
  argv = sys.argv[1:] if argv is None else argv
  if not argv or (argv[0].startswith("-") and argv[0] not in ("-h", "--help", "--version")):
    argv = ["demo", *argv]
  listing = "\n".join(f"  {name:<7}{summary}" for name, (_, summary) in _COMMANDS.items())
  parser = argparse.ArgumentParser(
    prog="python -m vsa_jax",
    description="Video Sparse Attention for JAX.",
    epilog=f"commands:\n{listing}\n\n'python -m vsa_jax COMMAND --help' says more.",
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument("--version", action="version", version=f"vsa_jax {_version('vsa_jax')}")
  parser.add_argument(
    "command", choices=_COMMANDS, metavar="COMMAND", help="what to run; default: demo"
  )
  command = parser.parse_args(argv[:1]).command
  module, _ = _COMMANDS[command]
  run = info if command == "info" else importlib.import_module(module).main
  try:
    run(argv[1:])
    return 0
  except (ValueError, NotImplementedError) as error:
    print(f"python -m vsa_jax {command}: {' '.join(str(error).split())}", file=sys.stderr)
    return 2


def info(argv: list[str]) -> None:
  """Prints versions, devices and implementations."""
  parser = argparse.ArgumentParser(prog="python -m vsa_jax info", description=_COMMANDS["info"][1])
  parser.parse_args(argv)
  import jax
  import jax.numpy as jnp

  import vsa_jax
  from vsa_jax.block_sparse.ffi import build_summary

  print(f"python {platform.python_version()} on {platform.platform()}")
  packages = ("vsa_jax", "jax", "jaxlib", "flax", "numpy", "av", "matplotlib", "tqdm")
  print("  ".join(f"{name} {_version(name)}" for name in packages))
  for device in jax.devices():
    print(f"device {device.id}: {device.device_kind} ({device.platform})")
  print("\n".join(build_summary()))
  layout = vsa_jax.TileLayout([77, (16, 28, 52)], (4, 4, 4))
  x = jax.ShapeDtypeStruct((1, layout.num_tokens, 12, 128), jnp.bfloat16)
  print("\nOn bfloat16, 12 heads of 128, 77 text tokens and a video of 16 x 28 x 52 tokens:")
  print(vsa_jax.explain(x, x, x, layout, sparsity=0.9))


def _version(package: str) -> str:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return "(not installed)"


if __name__ == "__main__":
  sys.exit(main())
