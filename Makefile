# memledger: `make run` shows the main job, `make test` installs what its tests need and runs them.
# Everything is built as the user who calls make; what needs root calls sudo itself.
.DEFAULT_GOAL := help
SETUP := tests/setup/setup.sh
CARGO ?= cargo
TARGET := $(or $(CARGO_TARGET_DIR),target)
IMAGE_NAME := ghcr.io/memledger/memledger:$(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
# where `make install` puts the program, below bin
PREFIX ?= /usr/local
# empty for root, and where there is no sudo: memledger then says what it cannot read
SUDO := $(if $(filter 0,$(shell id -u)),,$(shell command -v sudo))

help: ## show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: cargo ## build memledger and serve this host's metrics, as root where it can (ARGS="..." for flags)
	$(CARGO) build --release --locked
	$(SUDO) $(TARGET)/release/memledger serve $(ARGS)

install: cargo ## build memledger and install it as /usr/local/bin/memledger, with sudo where needed (PREFIX=... for elsewhere)
	$(CARGO) build --release --locked
	@mkdir -p "$(PREFIX)/bin" 2>/dev/null; sudo=; [ -w "$(PREFIX)/bin" ] || sudo="$(SUDO)"; \
	$$sudo install -D -m 755 "$(TARGET)/release/memledger" "$(PREFIX)/bin/memledger" && "$(PREFIX)/bin/memledger" --version

doctor: cargo ## show what memledger can read on this host
	$(CARGO) build --release --locked
	$(SUDO) $(TARGET)/release/memledger doctor $(ARGS)

ps: cargo ## show which containers use RAM and VRAM now, once (ARGS="..." for flags)
	$(CARGO) build --release --locked
	$(SUDO) $(TARGET)/release/memledger ps $(ARGS)

why: cargo ## explain what ended a container, or without NAME=... the newest kill or abnormal end on this host
	$(CARGO) build --release --locked
	$(SUDO) $(TARGET)/release/memledger why $(NAME) $(ARGS)

demo: cargo ## without a GPU host: containers go wrong, memledger watches (ARGS="--help"; needs root, or sudo)
	$(CARGO) build --release --locked --package memledger --package fake-nvml
	$(CARGO) rustc --release --locked --package hog --target-dir $(TARGET)/demo -- -C target-feature=+crt-static
	$(SUDO) python3 -B deploy/demo --target $(TARGET) $(ARGS)

test: cargo ## what each change has to pass: format, lints, unit tests, and a real test of each promise; installs what they need
	@tests/run.sh gate $(ARGS)

test-all: cargo ## all other tests: real systems, the cgroup v2 guest, the demo, the chart, the packages (ARGS="..." for nextest: a part of all)
	@tests/run.sh all $(ARGS)

soak: cargo ## counts too high for make test and test-all: 2,000 simulated worlds of the ledger for each of 20 seeds, two times 2,000 real kills, 10,000 restarts of the NVML process (2 h)
	failed=; for seed in $$(seq 20); do \
	  MEMLEDGER_TEST_SEED=$$seed MEMLEDGER_TEST_CASES=2000 $(CARGO) test --locked --release --lib -- diagnose::worlds:: || failed="$$failed $$seed"; \
	done; [ -z "$$failed" ] || { echo "worlds with wrong results: seeds$$failed" >&2; exit 1; }
	NEXTEST_PROFILE=soak MEMLEDGER_TEST_KILLS=2000 tests/run.sh gate --no-capture -E 'test(=oom::bursts::bursts_at_random_rates_with_default_sampling_misattribute_no_kill) + test(=oom::bursts::docker_restart_during_burst_loses_no_kill)'
	NEXTEST_PROFILE=soak MEMLEDGER_TEST_RESTARTS=10000 tests/run.sh gate -E 'test(/many_restarts_leak_nothing/)'

test-fresh: cargo ## README's commands on a fresh Debian 12, in a folder of this machine (ARGS="--help")
	@tests/fresh/fresh.sh $(ARGS)

test-servers: cargo ## the rules, dashboards and OTLP at Prometheus 3, VictoriaMetrics and a collector (built once, 6 to 20 min; then 5.5 min)
	@tests/servers/run.sh $(ARGS)

test-engines: cargo ## kills, exits and names with Docker 29, containerd 2, Compose 5 and Podman 5 (built once, 10 min)
	@tests/engines/run.sh $(ARGS)

test-kube: cargo ## the chart on a node of Kubernetes 1.34: names, kills, ends, memory, alerts (built once, 5 to 15 min; FULL=1: also eviction and containerd 2)
	@FULL=$(FULL) tests/kube/run.sh $(ARGS)

test-torch: ## the Python client beside the real torch from PyPI, on the CPU (5.4 GB, downloaded once; some minutes)
	@tests/torch.sh $(ARGS)

test-loop: cargo ## make test TIMES (10) times in a row, one line for each; STRESS=1: beside stress-ng; TIER=all: make test-all
	@tests/loop.sh $(or $(TIER),gate) $(or $(TIMES),10) $(ARGS)

check: cargo ## format, lints, and the tests that need nothing installed
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings
	$(CARGO) test --locked --lib --quiet
	$(CARGO) test --locked --test real --quiet -- layers:: layout:: names:: tables:: why::kinds::

golden: ## write the generated documents and the golden files anew; read the difference before you commit it
	UPDATE=1 $(CARGO) test --locked --test real --quiet -- tables:: recorded:: why::kinds::

size: ## lines of code by module, without tests, comments and blank lines, and the longest functions
	@python3 -B tests/size.py $(ARGS)

pictures: ## draw the dashboards with data of the demo and of a simulated history, and README's terminal, into docs/pictures
	@tests/pictures/pictures.sh
	@python3 -B tests/pictures/terminal.py $(TARGET)/release/memledger

manifests: ## write deploy/kubernetes, and the chart's tables, schema, rules and dashboards, anew
	@set -a && . "$$($(SETUP) cache)/env" && "$$MEMLEDGER_TEST_PYTHON" -B tests/helm/generate.py

bench: ## measure cost, also of GPUs, pods, OTLP and many requests, and how fast a kill is known, and write docs/performance.md
	$(CARGO) bench --locked --bench cycle
	$(CARGO) bench --locked --bench oom
	$(CARGO) bench --locked --bench gpu
	$(CARGO) bench --locked --bench readers
	$(SETUP) containerd env
	set -a && . "$$($(SETUP) cache)/env" && $(CARGO) bench --locked --bench cri
	$(CARGO) bench --locked --bench docker
	$(CARGO) bench --locked --bench otlp
	$(CARGO) bench --locked --bench web
	$(CARGO) bench --locked --bench inside
	$(CARGO) bench --locked --bench runs
	$(CARGO) bench --locked --bench past
	$(CARGO) bench --locked --bench logs
	$(CARGO) bench --locked --bench peers

bench-against: cargo ## compare builds, files, memory and CPU with another commit, side by side, and write docs/performance.md (REV=...; 35 min)
	@test -n "$(REV)" || { echo "which commit? make bench-against REV=..." >&2; exit 2; }
	@$(SETUP) engine image dist env
	@set -a && . "$$($(SETUP) cache)/env" && python3 -B benches/against.py $(REV) $(ARGS)

layout: cargo ## write deploy/layout/functions.txt, by which the linker orders the program, from what real tests call (needs root; 20 min)
	@deploy/layout/record.sh

bench-fleet: ## measure the dashboards at 200 hosts with 50 containers each, in a real Prometheus, and write the table of docs/fleet.md (some minutes)
	@$(SETUP) prometheus python env
	@set -a && . "$$($(SETUP) cache)/env" && "$$MEMLEDGER_TEST_PYTHON" -B tests/dashboards/fleet.py $(ARGS)

fuzz: ## give each parser of outside bytes SECONDS (60) of fuzzing; needs a nightly toolchain (ARGS="TARGET...")
	@fuzz/run.sh $(or $(SECONDS),60) $(ARGS)

audit: ## licences, banned crates and sources of all crates; known weaknesses, where their database can be fetched
	@deploy/supply/audit.sh

sbom: ## write what is linked into memledger, as CycloneDX, to target/memledger.cdx.json
	@$(SETUP) sbom
	@python3 -B deploy/supply/sbom.py "$$($(SETUP) cache)/cargo-cyclonedx/cargo-cyclonedx" $(TARGET)/memledger.cdx.json

dist: cargo ## build what is shipped into target/packages: program, wheel, tarball, deb; the same bytes wherever the source lies
	@$(SETUP) dist
	@deploy/supply/dist.sh $(TARGET)/packages
	@deploy/packages/build.sh $(TARGET)/packages

wheel: dist ## the wheel alone is target/packages/memledger_exporter-*.whl

image: dist ## the image around the program of make dist, without a network (IMAGE=NAME:TAG)
	@deploy/packages/image.sh $(TARGET)/packages/memledger $(or $(IMAGE),$(IMAGE_NAME))

test-packages: dist ## install wheel, deb, tarball, image and Compose files for real, each on a clean root; a part of make test-all
	@tests/packages/run.sh $(TARGET)/packages $(ARGS)

# with what to do where there is none, as under sudo
cargo:
	@bash -c '. tests/setup/lib.sh; need_cargo'

.PHONY: install wheel image test-all test-packages test-servers test-engines test-kube soak test-torch size cargo test-fresh test-loop fuzz audit sbom dist help run ps doctor demo test check golden pictures manifests bench bench-fleet bench-against layout
