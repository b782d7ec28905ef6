#!/bin/bash
# `make fuzz`: runs every target of this folder for a number of seconds, starting from the recorded test data and from inputs that
# earlier runs found (fuzz/corpus, not committed). Prints a summary line for each target; fails if there was a finding.
#
# usage: run.sh SECONDS [TARGET...]
#        $NIGHTLY  the toolchain, default nightly: stable compilers have no fuzzing instrumentation
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
seconds=${1:?usage: run.sh SECONDS [TARGET...]}
shift
nightly=${NIGHTLY:-nightly}

if ! command -v rustup >/dev/null || ! rustup run "$nightly" rustc --version >/dev/null 2>&1; then
  cat >&2 <<END
fuzz: toolchain $nightly is missing, nothing was fuzzed. Install it:
  rustup toolchain install nightly --profile minimal
or use an installed one: make fuzz NIGHTLY=nightly-2026-05-20
The same invariants are tested with random input, with the stable compiler, in \`make check\` and \`make test\`.
END
  exit 1
fi
tests/setup/setup.sh python fuzz
fuzzer=$(tests/setup/setup.sh cache)/cargo-fuzz/cargo-fuzz
export RUSTUP_TOOLCHAIN=$nightly
where=(--fuzz-dir fuzz --sanitizer none --target-dir "${CARGO_TARGET_DIR:-target}/fuzz") # there is no unsafe code to sanitize
python3 -B fuzz/corpus.py fuzz/corpus
"$fuzzer" fuzz build "${where[@]}"

if (($# == 0)); then mapfile -t targets < <("$fuzzer" fuzz list --fuzz-dir fuzz); else targets=("$@"); fi
summary=() status=0 log=$(mktemp)
trap 'rm -f "$log"' EXIT
for target in "${targets[@]}"; do
  # an input that takes ten seconds, or 2 GiB, is a finding too
  if "$fuzzer" fuzz run "${where[@]}" "$target" -- -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 \
    -max_len=16384 -print_final_stats=1 2>&1 | tee "$log" | grep -vE '^#|^\s+NEW_FUNC'; then
    end=ok
  else
    end="FINDING, see above"
    status=1
  fi
  count=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
  coverage=$(sed -n 's/.* cov: \([0-9]*\) .*/\1/p' "$log" | tail -n 1)
  summary+=("$(printf 'fuzz: %-13s %12s executions, coverage %s: %s' "$target" "${count:-?}" "${coverage:-?}" "$end")")
done
printf '%s\n' "${summary[@]}"
((status == 0)) || echo "fuzz: see CONTRIBUTING.md for what to do with a finding" >&2
exit "$status"
