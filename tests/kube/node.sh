#!/bin/bash
# A Kubernetes of one node on this machine, with memledger from its chart: etcd, kube-apiserver, kube-controller-manager, kube-scheduler,
# containerd and a kubelet, for `make test-kube`.
#
# All of it is in a network and a mount namespace of its own, with a /run, /var/lib and /var/log of its own. So all paths are the
# usual ones, no engine of this machine is touched, and mounts and networks end with the last process. Outside of it are only the folder, and
# the cgroups below kube-$MEMLEDGER_TEST_RUN. Pods have the processes and the kernel log of this machine.
#
# usage: node.sh up FOLDER BINARY         starts it, and installs the chart with an image of this memledger; ends when both are ready
#        node.sh start|stop FOLDER NAME   containerd or kubelet, for tests that restart it
#        node.sh run FOLDER COMMAND...    runs a command there, such as kubectl or helm
#        node.sh down FOLDER              ends and removes all of it, also what is half started
#
# Needs root, containerd, runc, the CNI plugins, a static busybox, and $MEMLEDGER_TEST_KUBE, _HELM, _KUBECTL and _HOG of the env file.
#   $KUBE_CONTAINERD  the folder of another containerd, with its shim and ctr
#   $KUBE_EVICT       available memory below which the kubelet evicts pods, default 100Mi; as of its next start
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=../setup/lib.sh
. "$here/../setup/lib.sh"

usage() { sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' "$0" >&2; exit 2; }
action=${1:-} folder=${2:-}
[[ -n $action && -n $folder ]] || usage
shift 2
if [[ $action != up && ! -d $folder/pid ]]; then
  [[ $action != down ]] || exit 0 # it was never started
  echo "node.sh: no node in $folder" >&2
  exit 1
fi
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
cgroup=kube-${MEMLEDGER_TEST_RUN:-local}
readonly ADDRESS=10.123.0.1 PODS=10.124.0.0/24 SERVICES=10.125.0.0/24
readonly CONTROLLERS=(/sys/fs/cgroup /sys/fs/cgroup/*/)

give_up() {
  echo "node.sh: failed or not in time: $1; the ends of $folder/logs:" >&2
  tail -n 8 "$folder"/logs/* >&2
  exit 1
}

# --- its namespaces, which exist as long as a process of them

# Another containerd must find its own shim first.
# Users have no sbin in their PATH.
programs_path() { echo "${KUBE_CONTAINERD:+$KUBE_CONTAINERD:}$MEMLEDGER_TEST_KUBE/bin:${MEMLEDGER_TEST_HELM%/*}:$PATH:/usr/sbin:/sbin"; }

inside() { enter command "$@"; }

# enter command|exec COMMAND...: what it keeps for its user, such as caches, is in the folder. `ip netns exec` would mount a /sys without
# the cgroups.
enter() {
  local how=$1
  shift
  "$how" nsenter --net --mount --target "$(<"$folder/pid/holder")" \
    env PATH="$(programs_path)" HOME="$folder/home" KUBECONFIG="$folder/admin.conf" "$@"
}

has_own_namespace() { [[ $(readlink "/proc/$1/exe") == */sleep && $(readlink "/proc/$1/ns/mnt") != "$(readlink /proc/self/ns/mnt)" ]]; }

make_namespaces() {
  local holder
  mkdir -p "$folder"/{pid,logs,cni,manifests,images,home,lib,log}
  # what this machine unmounts is also unmounted there
  setsid unshare --net --mount --propagation slave sleep infinity </dev/null >/dev/null 2>&1 &
  holder=$!
  echo "$holder" >"$folder/pid/holder"
  wait_until 10 has_own_namespace "$holder" || give_up 'the namespaces'
  readlink "/proc/$holder/ns/mnt" >"$folder/namespace"
  # the kubelet requires shared mounts; the address is a bridge's, because some kernels have no dummy interfaces
  inside sh -euc "
    mount --make-rshared /
    mount -t tmpfs -o mode=755 run /run
    mount --bind '$folder/lib' /var/lib
    mount --bind '$folder/log' /var/log
    ip link set lo up
    ip link add node0 type bridge
    ip addr add $ADDRESS/24 dev node0
    ip link set node0 up
    sysctl -qw net.ipv4.ip_forward=1"
}

# start NAME COMMAND...: in the background
start() {
  local name=$1
  shift
  # as the process that becomes the program, so that its pid is the program's
  enter exec setsid nice -n 5 "$@" </dev/null >>"$folder/logs/$name" 2>&1 &
  echo $! >"$folder/pid/$name"
}

has_ended() { ! kill -0 "$1"; }

stop() {
  local pid
  pid=$(<"$folder/pid/$1")
  kill "$pid"
  wait_until 30 has_ended "$pid" || give_up "the end of $1"
}

# Processes of the node: those in its mount namespace, and those of containers, by their cgroups.
processes() {
  local namespace controller
  namespace=$(cat "$folder/namespace" 2>/dev/null || true)
  if [[ -n $namespace ]]; then
    find /proc -maxdepth 3 -path '/proc/[0-9]*/ns/mnt' -lname "${namespace/[/\\[}" -printf '%P\n' 2>/dev/null | cut -d/ -f1 || true
  fi
  for controller in "${CONTROLLERS[@]}"; do
    if [[ -d $controller/$cgroup ]]; then
      find "$controller/$cgroup" -name cgroup.procs -exec cat {} + 2>/dev/null || true
    fi
  done
}

has_no_process() {
  local pids
  mapfile -t pids < <(processes | sort -u)
  ((${#pids[@]})) || return 0
  kill -KILL "${pids[@]}" 2>/dev/null || true
  return 1
}

has_no_cgroup() {
  local controller status=0
  for controller in "${CONTROLLERS[@]}"; do
    if [[ -d $controller/$cgroup ]]; then
      find "$controller/$cgroup" -depth -type d -exec rmdir {} + 2>/dev/null || status=1
    fi
  done
  return "$status"
}

# Nothing has to end in an orderly way: mounts, networks and volumes of pods end with the namespaces.
down() {
  local holder
  holder=$(cat "$folder/pid/holder" 2>/dev/null || true)
  # an interrupted start may not have recorded its namespace
  if [[ -n $holder && ! -e $folder/namespace ]]; then kill "$holder" 2>/dev/null || true; fi
  # The kernel gives the number of a namespace that is gone to another one: an open file keeps it. Without the holder only processes in its
  # cgroups are known to be the node's.
  if [[ -e $folder/namespace ]] && ! { exec 9<"/proc/${holder:-none}/ns/mnt" && [[ $(readlink "/proc/self/fd/9") == "$(<"$folder/namespace")" ]]; } 2>/dev/null; then
    rm "$folder/namespace"
  fi
  wait_until 30 has_no_process || give_up 'the end of its processes'
  exec 9<&-
  wait_until 30 has_no_cgroup || give_up 'the end of its cgroups'
  rm -rf --one-file-system "$folder"
}

# --- images, as `ctr images import` takes them; nothing is pulled

readonly REGISTRY=registry.example

words() {
  local out='' word
  for word in "$@"; do out+="${out:+, }\"$word\""; done
  echo "[$out]"
}

# image NAME ROOT ENTRYPOINT...: of one layer
image() {
  local name=$1 root=$2 sum architecture work=$2.work
  shift 2
  mkdir -p "$work"
  tar -C "$root" --sort=name --owner=0 --group=0 --numeric-owner --mtime=@0 -cf "$work/layer.tar" .
  sum=$(sha256sum "$work/layer.tar" | cut -d' ' -f1)
  case $(uname -m) in x86_64) architecture=amd64 ;; aarch64) architecture=arm64 ;; *) architecture=$(uname -m) ;; esac
  cat >"$work/config.json" <<END
{"architecture": "$architecture", "os": "linux", "rootfs": {"type": "layers", "diff_ids": ["sha256:$sum"]},
 "config": {"Env": ["PATH=/bin"], "Entrypoint": $(words "${@:1:1}"), "Cmd": $(words "${@:2}"), "WorkingDir": "/"}}
END
  echo "[{\"Config\": \"config.json\", \"RepoTags\": [\"$name\"], \"Layers\": [\"layer.tar\"]}]" >"$work/manifest.json"
  tar -C "$work" -cf "$root.tar" manifest.json config.json layer.tar
  rm -rf "$work"
}

# images BINARY: the pods' own, which also sleeps in place of a cluster's pause image, and memledger's
images() {
  local box=$folder/images/box own=$folder/images/memledger applet version
  mkdir -p "$box/bin" "$box/tmp"
  cp "$(static_busybox "$(test_cache)")" "$box/bin/busybox"
  for applet in $("$box/bin/busybox" --list); do [[ -e $box/bin/$applet ]] || ln -s busybox "$box/bin/$applet"; done
  cp "$MEMLEDGER_TEST_HOG" "$box/bin/hog"
  image "$REGISTRY/box:1" "$box" /bin/sleep 2147483647

  "$here/../../deploy/image-root.sh" "$1" "$own"
  strip "$own/memledger" # a debug build has 150 MB
  version=$(sed -n 's/^appVersion: *//p' "$here/../../helm/memledger/Chart.yaml" | tr -d '"')
  image "$REGISTRY/memledger/memledger:$version" "$own" /memledger serve
}

import_images() {
  local archive
  for archive in "$folder"/images/*.tar; do inside ctr -n k8s.io images import "$archive" >>"$folder/logs/images"; done
}

# --- its programs

write_containerd_configuration() {
  local restrict=false
  # Without CAP_SYS_RESOURCE no process may lower its oom_score_adj, and no sandbox would start: "can't get final child's PID from pipe: EOF".
  (echo -1 >/proc/self/oom_score_adj) 2>/dev/null || restrict=true
  if inside containerd --version | grep -q ' v\?1\.'; then
    cat <<END
version = 2
[plugins.'io.containerd.grpc.v1.cri']
  restrict_oom_score_adj = $restrict
  sandbox_image = "$REGISTRY/box:1"
[plugins.'io.containerd.grpc.v1.cri'.cni]
  bin_dir = "/usr/lib/cni"
  conf_dir = "$folder/cni"
END
  else
    cat <<END
version = 3
[plugins.'io.containerd.cri.v1.runtime']
  restrict_oom_score_adj = $restrict
[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = "$REGISTRY/box:1"
[plugins.'io.containerd.cri.v1.runtime'.cni]
  bin_dirs = ["/usr/lib/cni"]
  conf_dir = "$folder/cni"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
  # the newest one is built without seccomp, which the chart requests
  BinaryName = "$(type -P runc)"
END
  fi >"$folder/containerd.toml"
  cat >"$folder/cni/10-bridge.conflist" <<END
{"cniVersion": "0.4.0", "name": "pods", "plugins": [
 {"type": "bridge", "bridge": "pods0", "isGateway": true, "hairpinMode": true,
  "ipam": {"type": "host-local", "ranges": [[{"subnet": "$PODS"}]], "routes": [{"dst": "0.0.0.0/0"}]}},
 {"type": "loopback"}]}
END
}

start_containerd() {
  start containerd containerd --config "$folder/containerd.toml"
  wait_until 60 inside ctr version || give_up containerd
}

# kubeconfig NAME TOKEN
kubeconfig() {
  cat >"$folder/$1.conf" <<END
apiVersion: v1
kind: Config
clusters: [{name: kube, cluster: {server: "https://$ADDRESS:6443", certificate-authority: $folder/pki/apiserver.crt}}]
users: [{name: $1, user: {token: $2}}]
contexts: [{name: kube, context: {cluster: kube, user: $1}}]
current-context: kube
END
}

start_apiserver() {
  local name user group token
  mkdir -p "$folder/pki"
  openssl genrsa -out "$folder/pki/account.key" 2048 2>/dev/null
  while IFS=, read -r name user group; do
    token=$(openssl rand -hex 16)
    echo "$token" >"$folder/pki/$name.token"
    echo "$token,$user,$name,\"$group\"" >>"$folder/pki/tokens"
    kubeconfig "$name" "$token"
  done <<'END'
admin,admin,system:masters
node1,system:node:node1,system:nodes
manager,system:kube-controller-manager,
scheduler,system:kube-scheduler,
END
  start etcd etcd --data-dir "$folder/etcd" --listen-client-urls http://127.0.0.1:2379 --advertise-client-urls http://127.0.0.1:2379 \
    --listen-peer-urls http://127.0.0.1:2380 --unsafe-no-fsync
  start kube-apiserver kube-apiserver --etcd-servers=http://127.0.0.1:2379 --advertise-address="$ADDRESS" --cert-dir="$folder/pki" \
    --service-cluster-ip-range="$SERVICES" --service-account-issuer=https://kubernetes.default.svc \
    --service-account-key-file="$folder/pki/account.key" --service-account-signing-key-file="$folder/pki/account.key" \
    --token-auth-file="$folder/pki/tokens" --authorization-mode=Node,RBAC --allow-privileged=true \
    --kubelet-preferred-address-types=InternalIP --profiling=false
}

start_controllers() {
  # without credentials of its own for each controller it has no permissions
  start kube-controller-manager kube-controller-manager --kubeconfig="$folder/manager.conf" --leader-elect=false \
    --service-account-private-key-file="$folder/pki/account.key" --root-ca-file="$folder/pki/apiserver.crt" \
    --use-service-account-credentials=true
  start kube-scheduler kube-scheduler --kubeconfig="$folder/scheduler.conf" --leader-elect=false
}

# The kubelet makes kubepods in its own cgroup of each controller, but not that cgroup, nor its CPUs.
make_cgroups() {
  local controller file
  for controller in "${CONTROLLERS[@]}"; do
    if [[ ! -e $controller/cgroup.procs ]] || ! mkdir -p "$controller/$cgroup" 2>/dev/null; then continue; fi
    for file in cpuset.cpus cpuset.mems; do
      if [[ -e $controller/$cgroup/$file ]]; then cat "$controller/$file" >"$controller/$cgroup/$file" 2>/dev/null || true; fi
    done
  done
}

start_kubelet() {
  : >"$folder/resolv.conf" # there is no DNS
  cat >"$folder/kubelet.yml" <<END
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
address: $ADDRESS
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
cgroupDriver: cgroupfs
cgroupRoot: /$cgroup
failSwapOn: false
makeIPTablesUtilChains: false
staticPodPath: $folder/manifests
volumePluginDir: $folder/volume-plugins
resolvConf: $folder/resolv.conf
clusterDomain: cluster.local
evictionHard: {memory.available: ${KUBE_EVICT:-100Mi}, nodefs.available: 1%, imagefs.available: 1%, nodefs.inodesFree: 1%}
evictionPressureTransitionPeriod: 10s
imageGCHighThresholdPercent: 100
END
  if [[ ! -e /sys/fs/cgroup/cgroup.controllers ]]; then echo 'failCgroupV1: false' >>"$folder/kubelet.yml"; fi
  start kubelet kubelet --config="$folder/kubelet.yml" --kubeconfig="$folder/node1.conf" --hostname-override=node1 --node-ip="$ADDRESS"
  wait_until 60 inside curl -sf http://127.0.0.1:10248/healthz || give_up 'the kubelet'
}

# As docs/kubernetes.md does.
install_chart() {
  inside kubectl create namespace memledger
  inside kubectl label namespace memledger pod-security.kubernetes.io/enforce=privileged
  inside helm install memledger "$here/../../helm/memledger" -n memledger --set "image.registry=$REGISTRY" \
    --set 'settings.cri\.pod-labels={team}' --wait --timeout 90s || give_up 'the chart'
}

# record_kills FILE: how many processes the OOM killer has killed on this machine
record_kills() { awk '$1 == "oom_kill" { print $2 }' /proc/vmstat >"$folder/$1"; }

up() {
  make_namespaces
  start_apiserver # it takes the longest
  images "$1"
  write_containerd_configuration
  start_containerd
  import_images
  make_cgroups
  wait_until 120 inside kubectl get --raw /readyz || give_up 'the API server'
  start_controllers
  start_kubelet
  wait_until 120 inside kubectl wait --for=condition=Ready node/node1 --timeout=1s || give_up 'the node'
  record_kills kills-before-install
  install_chart >"$folder/logs/chart"
  record_kills kills-after-install
}

case $action in
  up) up "${1:?}" ;;
  start) case ${1:-} in containerd) start_containerd ;; kubelet) start_kubelet ;; *) usage ;; esac ;;
  stop) stop "${1:?}" ;;
  run) enter exec "$@" ;;
  down) down ;;
  *) usage ;;
esac
