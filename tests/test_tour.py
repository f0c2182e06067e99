"""The tour prints what docs/rules.md works out by hand, and the command line behaves."""

import pytest

from vsa_jax import __main__ as cli
from vsa_jax import tour


def test_tour_prints_the_oracles(capsys):
  assert tour.main([]) == 0
  text = capsys.readouterr().out
  for line in (
    "A: 0 1 4 5 16 17 20 21 32 33 36 37 48 49 52 53",
    "B: 2 3 6 7 18 19 22 23 34 35 38 39 50 51 54 55",
    "Position 2 holds token 4; untile_tokens puts it back at 4: yes.",
    "mean [1, 1]",
    "mean [2, 1]",
    "score(A, B) = 2.121320",
    "query A    0.2   3.1  -0.5   2.4   BD     1 3 -1 -1      2",
    "4 . . * # . . # #",
    "4 . . . . * # # #",
    "dense 4096    routing 16    sparse 2048",
    "pool to 0;",
    "the tiles score 0, yet a token pair reaches 100.",
    "sparsity 0.7  of  10 tiles keeps  3    (in floating point 4)",
    "sparsity 0.75 of 256 tiles keeps 64",
    "sparsity 0.9  of 630 tiles keeps 63",
    "17 tiles: prefix 5, video regions [5, 9), [9, 17)",
    "sizes 128 2 60 128 72 128 128 128 128 128 128 128 128 128 128 128 128",
    "1926 tokens in 2176 slots (17 x 128)",
    "token  137 sits in tile  5 at place 7",
    "token 1925 sits in tile 16 at place 127",
    "by query tile: 17 17 17 17 17 8 8 8 8 8 8 8 8 8 8 8 8",
  ):
    assert line in text
  assert text.isascii()
  lines = text.splitlines()
  assert max(map(len, lines)) <= 110
  assert len(lines) <= 100  # two screens


def test_info_says_what_runs_and_why_not(capsys):
  assert cli.main(["info"]) == 0
  text = capsys.readouterr().out
  assert "jax " in text
  assert "device 0" in text
  assert "chosen" in text
  assert "23373 tokens in 366 tiles of 64 (2 prefix tiles" in text


@pytest.mark.parametrize("argv", [["fly"], ["info", "extra"], ["tour", "--fast"], ["--no-such"]])
def test_a_wrong_call_exits_2(argv, capsys):
  with pytest.raises(SystemExit) as stop:
    cli.main(argv)
  assert stop.value.code == 2
  error = capsys.readouterr().err
  assert argv[-1] in error
  assert "Traceback" not in error


def test_help_lists_the_commands(capsys):
  with pytest.raises(SystemExit) as stop:
    cli.main(["--help"])
  assert stop.value.code == 0
  text = capsys.readouterr().out
  for command in ("demo", "tour", "info", "bench"):
    assert f"\n  {command}" in text


def test_no_command_runs_the_demo(monkeypatch):
  from vsa_jax import demo

  calls = []
  monkeypatch.setattr(demo, "main", lambda argv: calls.append(argv))
  assert cli.main([]) == 0
  assert cli.main(["--steps", "3"]) == 0
  assert calls == [[], ["--steps", "3"]]


def test_errors_are_one_line_and_exit_2(capsys):
  assert cli.main(["demo", "no such file.mp4"]) == 2
  error = capsys.readouterr().err
  assert error.count("\n") == 1
  assert "clip: got 'no such file.mp4', want a video file" in error
