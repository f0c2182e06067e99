"""Every report has a test, or a reason why not."""

import pathlib
import re

# Letter by letter, as the list of reports numbers them.
_NUMBERS = {
  "A": (1, 3, 5, 7, 9, 10, 12, 14, 15, 17),
  "B": (1, 3, 4, 6, 7, 9, 10, 11),
  "C": (1, 3, 5, 6, 8, 10, 11, 12, 14),
  "D": (1, 3, 5, 7, 8, 10, 12, 13, 14),
  "E": (1, 3, 4, 5, 6, 8, 10, 11, 13, 15),
  "F": (1, 3, 5, 6, 8, 9, 10, 11, 12, 13),
  "G": (1, 3, 5, 6, 7, 8, 9),
  "H": (1, 2, 3, 4, 6, 8, 10, 12),
  "I": (1, 3, 4, 5, 6, 8),
  "J": (1, 4, 5, 7, 8),
  "K": (1, 2, 3, 4, 6),
  "L": (1, 2, 3, 5, 6, 7, 9, 11, 12, 13, 15),
}
IDS = [f"{letter}{number:02}" for letter, numbers in _NUMBERS.items() for number in numbers]


def test_every_report_is_covered(not_on_cpu):
  assert len(IDS) == len(set(IDS)) == 98
  tested = set()
  for file in pathlib.Path(__file__).parent.glob("test_*.py"):
    tested |= set(re.findall(r"^def test_([A-L]\d\d)_", file.read_text(), re.MULTILINE))
  assert not tested & not_on_cpu.keys()
  assert sorted(tested | not_on_cpu.keys()) == IDS
  assert all(len(reason) > 20 for reason in not_on_cpu.values())
