# memledger: `make run` shows the main job, `make test` installs what tests need and runs them all.
.DEFAULT_GOAL := help
SETUP := tests/setup/setup.sh
CARGO ?= cargo
TARGET := $(or $(CARGO_TARGET_DIR),target)

help: ## show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: ## build memledger and serve this host's metrics (ARGS="..." for flags)
	$(CARGO) run --release --locked -- serve $(ARGS)

doctor: ## show what memledger can read on this host
	$(CARGO) run --release --locked -- doctor $(ARGS)

demo: ## without a GPU host: containers go wrong, memledger watches (ARGS="--help"; needs root, or sudo)
	$(CARGO) build --release --locked --package memledger --package fake-nvml
	$(CARGO) rustc --release --locked --package hog --target-dir $(TARGET)/demo -- -C target-feature=+crt-static
	$(if $(filter 0,$(shell id -u)),,sudo) python3 -B deploy/demo --target $(TARGET) $(ARGS)

test: ## install what the tests need, and run all of them, also in the cgroup v2 guest
	@tests/run.sh

check: ## format, lints, and the tests that need nothing installed
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings
	$(CARGO) test --locked --lib --quiet
	$(CARGO) test --locked --test real --quiet -- layers:: tables::

golden: ## write the generated documents and the golden files anew; read the difference before you commit it
	UPDATE=1 $(CARGO) test --locked --test real --quiet -- tables:: recorded::

pictures: ## draw the dashboards with data of the demo, into docs/pictures
	@tests/pictures/pictures.sh

manifests: ## write deploy/kubernetes, and the tables of the chart's README and schema, anew
	@set -a && . "$$($(SETUP) cache)/env" && "$$MEMLEDGER_TEST_PYTHON" -B tests/helm/generate.py

bench: ## measure cost, also of GPUs, pods, OTLP and many requests, and how fast a kill is known, and write docs/performance.md
	$(CARGO) bench --locked --bench cycle
	$(CARGO) bench --locked --bench oom
	$(CARGO) bench --locked --bench gpu
	$(CARGO) bench --locked --bench drm
	$(CARGO) bench --locked --bench readers
	$(CARGO) bench --locked --bench cri
	$(CARGO) bench --locked --bench otlp
	$(CARGO) bench --locked --bench web

fuzz: ## give each parser of outside bytes SECONDS (60) of fuzzing; needs a nightly toolchain (ARGS="TARGET...")
	@fuzz/run.sh $(or $(SECONDS),60) $(ARGS)

audit: ## licences, banned crates and sources of all crates; known weaknesses, where their database can be fetched
	@deploy/supply/audit.sh

sbom: ## write what is linked into memledger, as CycloneDX, to target/memledger.cdx.json
	@$(SETUP) sbom
	@python3 -B deploy/supply/sbom.py "$$($(SETUP) cache)/cargo-cyclonedx/cargo-cyclonedx" $(TARGET)/memledger.cdx.json

dist: ## build the program as it is shipped: the same bytes wherever the source lies
	@deploy/supply/dist.sh

.PHONY: fuzz audit sbom dist help run doctor demo test check golden pictures manifests bench
