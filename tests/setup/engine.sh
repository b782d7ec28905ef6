#!/bin/bash
# A Docker engine for the tests: the one that responds already, or else a dockerd of our own.
#
# Our own has its data, log and pid file in the cache folder and listens where clients look by default. It has no bridge
# and touches neither packet filter nor forwarding: no test needs a network, and the machine keeps its own. (Containers
# then run with the loopback only; `docker run` warns about forwarding unless it has `--network none` or `host`.)
# A dockerd without a bridge deletes a docker0 that it finds. Where there is one, it is another engine's, so ours runs in a network
# namespace of its own; the tests of the image with `--network host` (`make test-packages`) cannot reach their containers then.
# Not a service: nothing starts it again after a reboot, `setup.sh` does.
#
# usage: engine.sh start | stop | status
#        stop ends only the dockerd that start started.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=lib.sh
. "$here/lib.sh"

cache=$(test_cache)
readonly folder=$cache/engine
readonly pid_file=$folder/dockerd.pid log=$folder/dockerd.log socket=/var/run/docker.sock

responds() { timeout 20 docker info --format '{{.ServerVersion}}' >/dev/null 2>&1; }

describe() {
  docker info --format '{{.ServerVersion}}, {{.Driver}}, cgroup v{{.CgroupVersion}} ({{.CgroupDriver}})'
}

# The pid of our dockerd if it is alive; a stale file may have the pid of another process, so its command line is compared.
our_pid() {
  local pid
  pid=$(cat "$pid_file" 2>/dev/null) || return 1
  # shellcheck disable=SC2002 # cat, whose error message can be silenced when the process is gone
  cat "/proc/$pid/cmdline" 2>/dev/null | tr '\0' ' ' | grep -qF -- "--pidfile $pid_file" || return 1
  echo "$pid"
}

start() {
  if responds; then
    local whose=system
    our_pid >/dev/null && whose=ours
    echo "$whose, $(describe)"
    return
  fi
  if [[ -n ${DOCKER_HOST:-} && $DOCKER_HOST != unix://$socket ]]; then
    echo "DOCKER_HOST is $DOCKER_HOST and nothing responds there: unset it to let the tests start an engine" >&2
    return 1
  fi
  has dockerd || { echo "no engine responds and dockerd is not installed" >&2; return 1; }
  mkdir -p "$folder"
  if ! our_pid >/dev/null; then
    # The group of the caller owns the socket, so that tests of a user with sudo reach it.
    # It must not keep the descriptors of setup.sh: its lock (9), and the pipe (3) whose reader waits for the last writer.
    # dockerd picks the storage driver: overlay2, or vfs where the cache itself lies on an overlay.
    local netns=()
    if [[ -e /sys/class/net/docker0 ]]; then netns=(unshare --net); fi
    as_root env -u DOCKER_HOST setsid "${netns[@]}" dockerd --pidfile "$pid_file" --data-root "$folder/data" -H "unix://$socket" \
      -G "$(id -g)" --bridge none --iptables=false --ip6tables=false --ip-forward=false --ip-masq=false \
      >"$log" 2>&1 </dev/null 3>&- 9>&- &
    disown
  fi
  if ! wait_until 60 responds; then
    echo "dockerd did not respond within 60 s; the end of its log ($log):" >&2
    tail -n 15 "$log" >&2
    return 1
  fi
  echo "started (pid $(our_pid || echo '?')), $(describe)"
}

gone() { ! our_pid >/dev/null; }

stop() {
  local pid
  pid=$(our_pid) || { echo "no engine of ours runs"; return; }
  as_root kill "$pid"
  wait_until 60 gone || { echo "dockerd (pid $pid) does not stop" >&2; return 1; }
  echo "stopped (pid $pid)"
}

case ${1:-} in
  start) start ;;
  stop) stop ;;
  status) if responds; then describe; else echo "no engine responds"; exit 1; fi ;;
  *) sed -n '2,/^set /s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
