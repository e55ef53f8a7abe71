#!/bin/sh
# share.sh FROM TO PYTHON: a virtual environment TO with the packages of FROM, by hard links.
# pip and the tests replace files and never write into one, so neither environment sees the other's
# changes. The compiled modules are linked too: their sources have the same times there.
set -eu
from=$1 to=$2
rm -rf "$to"
"$3" -m venv --without-pip "$to"
cp -al "$from/lib/." "$to/lib"
cp -al "$from/triton" "$to"
compiled="$from/cache/python$PWD/$from"
if [ -d "$compiled" ]; then
  mkdir -p "$to/cache/python$PWD"
  cp -al "$compiled" "$to/cache/python$PWD/$to"
fi
