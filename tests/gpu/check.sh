#!/bin/bash
# Compares memledger's GPU figures with nvidia-smi's and PyTorch's own, on a machine with a real NVIDIA GPU and no Docker,
# and records the process trees of real PyTorch training. Needs a built memledger, and a Python with torch. Takes a few
# minutes, eight at most; leaves nothing behind but its report.
#
# The part `inside` has memledger's Python client report from the PyTorch processes. The part `analyze` needs torchvision and transformers
# too; batches that do not fit into the GPU are left out.
#
# usage: check.sh [--out DIR] [--binary MEMLEDGER] [--python PYTHON] [--only NAME,...]
#        [--nvidia-smi PROGRAM] [--nvml-library FILE] [--stand-in DIR]
#
#   --out        where report.md, trees.jsonl, metrics.prom and memledger.log go (default: target/gpu-check)
#   --binary     default: target/release/memledger, else target/debug/memledger
#   --python     default: python3
#   --only       with commas, some of: known devices two inside tracked analyze spike leak compute exhaust cleanup cost ends trees; or single trees:
#                dataloader-fork dataloader-spawn dataloader-forkserver ddp-gloo-2-ranks ddp-nccl-1-rank
#   --nvidia-smi, --nvml-library and --stand-in are for the dry run (tests/gpu/check.rs, tests/gpu/standin), which proves
#   nothing of a GPU
#
# Ends with 0 if every comparison held; 1 if one did not, or the check was stopped; 2 if nothing could be compared; 64 if
# it was called wrongly; 124 or 137 if it ran past its time.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
readonly LIMIT_S=465 # what is still running then is ended; the check itself stops waiting before

out=$root/target/gpu-check binary='' python=python3
pass=()
while (($#)); do
  case $1 in
    --out) out=$2; shift 2 ;;
    --binary) binary=$2; shift 2 ;;
    --python) python=$2; shift 2 ;;
    --only | --nvidia-smi | --nvml-library | --stand-in) pass+=("$1" "$2"); shift 2 ;;
    *) sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2; exit 64 ;;
  esac
done
if [[ -z $binary ]]; then
  for binary in "$root/target/release/memledger" "$root/target/debug/memledger"; do [[ -x $binary ]] && break; done
fi
if [[ ! -x $binary ]]; then
  echo "no memledger at $binary: build it (cargo build --release), or name it with --binary" >&2
  exit 2
fi
mkdir -p "$out"
# TERM lets the check end its processes and remove its cgroups; KILL comes only if it does not
exec timeout --kill-after=20 "$LIMIT_S" "$python" -u "$here/check" --out "$out" --binary "$binary" "${pass[@]}"
