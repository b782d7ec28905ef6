#!/bin/bash
# Runs a program as root with the whole environment of the caller, which sudo by itself would cut: cargo's runner for a user
# who is not root.
#
# usage: as-root.sh PROGRAM [ARGUMENT...]
set -euo pipefail
# shellcheck source=setup/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup/lib.sh"
as_root_with_environment "$@"
