#!/bin/sh
# Runs a compiler and fails where ptxas says that it gave up on what makes a kernel fast: serialised wgmma
# (C7510 and its kin), an ignored setmaxnreg (C7508).  ptxas calls these notes, so no flag makes errors of them.
messages=$(mktemp) || exit 1
trap 'rm -f "$messages"' EXIT
"$@" 2> "$messages"
status=$?
cat "$messages" >&2
if [ "$status" -eq 0 ] && grep -q "Potential Performance Loss" "$messages"; then
  echo "error: ptxas reports a potential performance loss (above)" >&2
  exit 1
fi
exit "$status"
