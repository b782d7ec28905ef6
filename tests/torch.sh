#!/bin/bash
# `make test-torch`: the Python client beside the real torch, on the CPU, with Hugging Face's and Lightning's trainers.
#
# usage: torch.sh [ARGUMENT...]    for pytest
#
# $MEMLEDGER_TEST_TORCH  the version of torch (default: the one below). Each has a virtual environment in the cache folder,
#                        5.4 GB for those with CUDA, and a log of what is installed beside it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../python"
version=${MEMLEDGER_TEST_TORCH:-2.15.0}
venv=$(../tests/setup/setup.sh cache)/torch-$version
if [[ ! -e $venv/made ]]; then
  rm -rf "$venv"
  /usr/bin/python3 -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-cache-dir \
    "torch==$version" numpy "$(grep ^pytest== ../tests/setup/requirements.txt)" transformers accelerate lightning
  "$venv/bin/python" -m pip freeze >"$venv/made"
fi
folder=$(mktemp -d "${TMPDIR:-/tmp}/mlt-py.XXXXXX")
trap 'rm -rf "$folder"' EXIT
"$venv/bin/python" -B -m pytest --basetemp="$folder/t" -o "cache_dir=$folder/cache" tests/torch "$@"
