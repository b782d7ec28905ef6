#!/bin/bash
# `make image`: the image around the program of `make dist`. Nothing is pulled and nothing is compiled: the final stage of
# deploy/Dockerfile begins from scratch, and its root is made from this machine's glibc and certificate authorities.
#
# usage: image.sh PROGRAM NAME:TAG [LABEL...]    a LABEL makes it an image of its own, with another id than one of the same files
# needs: docker, and glibc no older than the program needs
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
context=$(mktemp -d)
trap 'rm -rf "$context"' EXIT
deploy/image-root.sh "$1" "$context/image"
sed -n '/^FROM scratch$/,$p' deploy/Dockerfile | sed 's,^COPY --from=build /image/ /$,COPY image/ /,' >"$context/Dockerfile"
# without BuildKit, whose plugin is another package
labels=()
for label in "${@:3}"; do labels+=(--label "$label"); done
DOCKER_BUILDKIT=0 docker build --quiet --network none "${labels[@]}" --tag "$2" "$context"
