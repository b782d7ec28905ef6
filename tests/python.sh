#!/bin/bash
# The tests of the Python client, with the Python of the tests: `tests/python.sh ARGUMENT...`, for pytest. No GPU, no torch, no root.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../python"
python=${MEMLEDGER_TEST_PYTHON:-$(../tests/setup/setup.sh cache)/venv/bin/python}
folder=$(mktemp -d "${TMPDIR:-/tmp}/mlt-py.XXXXXX")
trap 'rm -rf "$folder"' EXIT
"$python" -B -m pytest --basetemp="$folder/t" -o "cache_dir=$folder/cache" "$@"
