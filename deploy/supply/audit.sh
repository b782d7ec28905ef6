#!/bin/bash
# `make audit`: checks Cargo.lock against deny.toml: licences, banned crates, sources. Also known vulnerabilities, if the database of
# advisories can be fetched; if not, the summary says NOT CHECKED.
#
# usage: audit.sh      fails if a part failed; prints a summary line for each part
#        $AUDIT_STRICT  if set, advisories that could not be checked are a failure, as for a release
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
tests/setup/setup.sh python deny
deny=$(tests/setup/setup.sh cache)/cargo-deny/cargo-deny
log=$(mktemp)
trap 'rm -f "$log"' EXIT
status=0 offline=ok

"$deny" --locked --workspace check licenses bans sources || { status=1 offline="FAILED, see above"; }
if "$deny" --locked --workspace check advisories >"$log" 2>&1; then
  advisories="ok"
  cat "$log"
elif grep -q 'failed to fetch advisory database' "$log"; then
  advisories="NOT CHECKED: the database could not be fetched from https://github.com/RustSec/advisory-db"
  [[ -z ${AUDIT_STRICT:-} ]] || status=1
else
  advisories="FAILED"
  cat "$log"
  status=1
fi
echo "audit: licences, bans, sources: $offline"
echo "audit: advisories: $advisories"
exit "$status"
