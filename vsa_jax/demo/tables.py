"""What the demo prints: what it is about to do and, in the end, its numbers, each with its meaning."""

from __future__ import annotations

from typing import Any

from vsa_jax.attention import Explanation
from vsa_jax.demo.clip import Clip


def introduce(clip: Clip, explanation: Explanation) -> None:
  """Prints the clip, and which implementation runs, and why."""
  frames, height, width, _ = clip.frames.shape
  held_out = frames - clip.num_train
  apart = "" if clip.stride == 1 else f", {clip.stride} apart"
  print(f"{clip.name}: {frames} frames of {height} x {width} pixels after shrinking.")
  print(
    f"Models see windows of {clip.length} frames{apart}; none is trained on the last {held_out} frames.\n"
  )
  print("Attention of the sparse models (the dense one is the same code, keeping every tile):")
  print(explanation, end="\n\n")


def print_tables(report: dict[str, Any]) -> None:
  """Prints the numbers of `compare`."""
  variants, steps = report["variants"], report["steps"]
  print(
    f"\n1. The dense model after {steps['dense']} steps; the same weights with other attention swapped in:"
  )
  _row("", "tile pairs kept", "coverage", "output error", "held-out loss")
  for name, numbers in variants.items():
    was = numbers["swapped in"]
    shares = (f"{x:.1%}" for x in (numbers["kept"], was["coverage"]))
    _row(name, *shares, f"{was['error']:.2%}", f"{was['loss']:.4f}")
  print(
    f"\n2. After {steps['then each']} steps more, each model with its own attention, same batches, same noise:"
  )
  _row("", "training step", "of dense's", "coverage", "denoised", "held-out loss")
  for name, numbers in variants.items():
    now, step = numbers["trained on"], numbers["step_ms"]
    share = step / variants["dense"]["step_ms"]
    values = f"{step:.0f} ms", f"{share:.0%}", f"{now['coverage']:.1%}", f"{now['psnr']:.1f} dB"
    _row(name, *values, f"{now['loss']:.4f}")

  attention = report["attention"]
  _, tokens, heads, dim = attention["shape"]
  print(
    f"\n3. Attention alone, {tokens} tokens, {heads} heads of {dim}, float32, forward and backward, best of 5:"
  )
  for name, milliseconds in attention["ms"].items():
    print(f"  {name:<31}{milliseconds:>8.1f} ms")

  times = ", ".join(f"{t:g}" for t in report["flow_times"]["loss"])
  noised = f"flow time {report['flow_times']['pictures']:g} ({report['noised_psnr']:.1f} dB)"
  print(
    f"""
tile pairs kept  of all pairs of a query tile and a key tile, those whose attention is computed
coverage         share of dense attention's probability inside the kept tiles, mean over blocks, heads and tokens;
                 tiles kept at random would cover about what is kept
output error     norm of the difference from the dense model's output over its norm; flow times {times}
held-out loss    mean squared error of the velocity, same flow times; pixels have variance 1; lower is better
training step    median wall time of forward, backward and optimizer; the three models take turns
denoised         PSNR against the original after {report["euler_steps"]} Euler steps from {noised}; higher is better

In table 1 a gate changes nothing: it starts at zero. A run this small shows how the pieces work and what a step
costs here. It learns one scene by heart (the held-out frames are of the same scene), has barely learnt to attend,
another seed may order the losses otherwise, and none of it says anything about the quality of a large model."""
  )
  if steps["dense"] < 40:
    print(
      f"{steps['dense']} dense steps leave it all but untrained; --seconds or --steps takes more."
    )


def _row(name: str, *values: str) -> None:
  print(f"  {name:<14}" + "".join(f"{value:>16}" for value in values))
