# memledger: `make run` shows the main job, `make test` installs what tests need and runs them all.
.DEFAULT_GOAL := help
SETUP := tests/setup/setup.sh
CARGO ?= cargo

help: ## show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: ## build memledger and serve this host's metrics (ARGS="..." for flags)
	$(CARGO) run --release --locked -- serve $(ARGS)

doctor: ## show what memledger can read on this host
	$(CARGO) run --release --locked -- doctor $(ARGS)

test: ## install what the tests need, and run all of them, also in the cgroup v2 guest
	@tests/run.sh

check: ## format, lints, and the tests that need nothing installed
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings
	$(CARGO) test --locked --lib --quiet
	$(CARGO) test --locked --test real --quiet -- layers:: tables::

golden: ## write the generated documents and the golden files anew; read the difference before you commit it
	UPDATE=1 $(CARGO) test --locked --test real --quiet -- tables:: recorded::

bench: ## measure cost, also of GPUs and of OTLP, and how fast a kill is known, and write docs/performance.md
	$(CARGO) bench --locked --bench cycle
	$(CARGO) bench --locked --bench oom
	$(CARGO) bench --locked --bench gpu
	$(CARGO) bench --locked --bench drm
	$(CARGO) bench --locked --bench readers
	$(CARGO) bench --locked --bench otlp

.PHONY: help run doctor test check golden bench
