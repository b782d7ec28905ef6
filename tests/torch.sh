#!/bin/bash
# `make test-torch`: the Python client beside the real torch, on the CPU, with Hugging Face's and Lightning's trainers, and with the packages
# that draw graphs, offline.
#
# usage: torch.sh [ARGUMENT...]    for pytest
#
# $MEMLEDGER_TEST_TORCH  the version of torch (default: the one below). Each has a virtual environment in the cache folder,
#                        5.4 GB for those with CUDA, and a log of what is installed beside it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../python"
version=${MEMLEDGER_TEST_TORCH:-2.15.0}
venv=$(../tests/setup/setup.sh cache)/torch-$version
packages=("torch==$version" numpy "$(grep ^pytest== ../tests/setup/requirements.txt)" transformers accelerate lightning
  clearml tensorboard wandb mlflow-skinny)
if [[ $(cat "$venv/made-from" 2>/dev/null) != "${packages[*]}" ]]; then
  rm -rf "$venv"
  /usr/bin/python3 -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-cache-dir "${packages[@]}"
  "$venv/bin/python" -m pip freeze >"$venv/made"
  echo "${packages[*]}" >"$venv/made-from"
fi
folder=$(mktemp -d "${TMPDIR:-/tmp}/mlt-py.XXXXXX")
trap 'rm -rf "$folder"' EXIT
"$venv/bin/python" -B -m pytest --basetemp="$folder/t" -o "cache_dir=$folder/cache" tests/torch "$@"
