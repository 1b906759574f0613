# fragprof: what a person types. `make help` lists it.

CARGO ?= cargo
FRAGPROF := target/release/fragprof
TARGET := $(shell uname -m)-unknown-linux-gnu
STATIC := target/$(TARGET)/release/fragprof
IMAGE ?= localhost/fragprof:$(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
CONTAINER_PACKAGES := podman runc containerd buildah docker.io busybox-static
# What building and the demo need beside Rust; the tests need TEST_PACKAGES too.
BUILD_PACKAGES := clang gcc g++ make pkg-config libelf-dev zlib1g-dev linux-libc-dev
TEST_PACKAGES := redis-server redis-tools libjemalloc2 libjemalloc-dev libtcmalloc-minimal4 libgoogle-perftools-dev libmimalloc2.0 \
	libmimalloc-dev musl-tools busybox-static gdb valgrind binutils default-jdk-headless nodejs python3 golang-go php-cli ruby util-linux protobuf-compiler prometheus podman runc containerd chromium fonts-dejavu-core systemtap-sdt-dev sqlite3 gawk perl postgresql \
	gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static

.PHONY: help
help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 18

.PHONY: deps
deps: ## install what the build needs
	@scripts/install-packages.sh $(BUILD_PACKAGES)

.PHONY: test-deps
test-deps: deps ## install what the tests need
	@scripts/install-packages.sh $(TEST_PACKAGES)
	@go tool pprof -h >/dev/null 2>&1 || true # newer Go builds it at its first use, which a test should not wait for

.PHONY: build
build: deps ## the release binary
	$(CARGO) build --release

.PHONY: demo
demo: build ## the main job, on a small service that leaks and fragments
	demo/run.sh $(FRAGPROF)

.PHONY: test
test: test-deps lint ## everything: format, lints, unit, property and integration tests
	@scripts/mount-kernel-filesystems.sh
	$(CARGO) test --features otlp -- --test-threads=2

.PHONY: test-containers
test-containers: deps static ## the tests in real containers with the static image, and every builder of it
	@scripts/install-packages.sh $(CONTAINER_PACKAGES)
	FRAGPROF_IMAGE_PROGRAM=$(CURDIR)/$(STATIC) $(CARGO) test --test integration containers:: -- --test-threads=2
	scripts/test-image.sh $(STATIC)

.PHONY: static
static: deps ## one static program, for any Linux of this architecture
	RUSTFLAGS="-C target-feature=+crt-static" LIBBPF_SYS_LIBRARY_PATH=$$(scripts/library-path.sh) \
		$(CARGO) build --release --features static --target $(TARGET)
	@file $(STATIC) 2>/dev/null || true

.PHONY: image
image: static ## the agent's image, with podman, buildah or docker
	scripts/build-image.sh $(STATIC) $(IMAGE)

.PHONY: manifests
manifests: ## the plain Kubernetes manifests, from the Helm chart
	scripts/render-manifests.sh

.PHONY: charts
charts: ## lint and render the Helm chart; installs helm with go if it is not there
	scripts/check-chart.sh

.PHONY: lint
lint: deps ## formatting and clippy, warnings are errors
	$(CARGO) fmt --check
	$(CARGO) clippy --all-targets -- -D warnings

.PHONY: bench
bench: build ## the figures of exact mode, as ratios measured in one run
	$(FRAGPROF) bench

.PHONY: bench-governed
bench-governed: build test-deps ## what a budget of 1 % and the census cost four programs, three quarters of an hour
	benches/governed/run.sh $(FRAGPROF)

.PHONY: bench-node
bench-node: deps ## what the agent takes on a node of 100 processes, 20 of them busy, with the governed tier on
	$(CARGO) test --release --test integration figures_of_a_node -- --ignored --nocapture

.PHONY: soak-windows
soak-windows: deps ## 2,000 windows on a busy process, ten minutes
	$(CARGO) test --test integration two_thousand_windows -- --ignored --nocapture

.PHONY: cost-of-rare-events
cost-of-rare-events: deps ## what first touches of pages and growth of the heap cost while they are watched
	$(CARGO) test --test integration cost_of_rare_events -- --ignored --nocapture

.PHONY: coverage-windows
coverage-windows: test-deps ## twenty recordings in windows of a program with phases: how often the stated intervals hold, six minutes
	$(CARGO) test --test integration intervals_of_a_program_with_phases -- --ignored --nocapture

.PHONY: retention
retention: test-deps ## what is said of survivors after their windows, against a ledger preloaded into six real programs, a minute
	$(CARGO) test --test integration no_retention_flag_of_six_real_programs_is_wrong_after -- --ignored --nocapture

.PHONY: verdicts
verdicts: test-deps ## verdicts on programs whose owner's answer is known: the table, and what their confidence is worth, ten minutes
	$(CARGO) test --test integration table_of_verdicts -- --ignored --nocapture

.PHONY: bench-ledger
bench-ledger: deps ## the ledger's figures
	$(CARGO) bench --bench ledger

.PHONY: bench-census
bench-census: test-deps ## the census's figures, each beside its goal
	$(CARGO) bench --bench census

.PHONY: bench-leaks
bench-leaks: deps ## what leaks costs: look-ups, time a GiB, memory a block, what the target loses (BLOCKS=40000000: 10 GiB)
	$(CARGO) bench --bench leaks

.PHONY: coverage-leaks
coverage-leaks: test-deps ## planted leaks among moving blocks, twenty times at each of three rates, a quarter of an hour
	$(CARGO) test --test integration leaks_are_found_twenty_times -- --ignored --nocapture

.PHONY: census-suites
census-suites: test-deps ## the census under every glibc and jemalloc of Debian's suites, and their trims
	$(CARGO) test --test integration census::suites -- --ignored --nocapture --test-threads=2

.PHONY: bench-unwind
bench-unwind: deps ## the unwind tables' figures, over every file under /usr
	$(CARGO) bench --bench unwind

.PHONY: bench-sampler
bench-sampler: deps ## what sampling in the process costs: a pair, a sample and its free, real programs; heaptrack beside it
	@scripts/install-packages.sh heaptrack postgresql mariadb-server
	$(CARGO) test --release --test integration figures -- --ignored --nocapture --test-threads 1

.PHONY: coverage-sampled
coverage-sampled: deps ## a hundred recordings by an emitter: how often the stated intervals hold
	$(CARGO) test --test integration within_its_stated_interval_a_hundred_times -- --ignored --nocapture

.PHONY: stress-sampler
stress-sampler: deps ## a week's worth of samples in some minutes leaves nothing behind in the process
	$(CARGO) test --test integration a_weeks_worth_of_samples -- --ignored --nocapture

.PHONY: sampled-suites
sampled-suites: build test-deps ## the test suites of CPython and Redis, sampled and listened to
	@scripts/install-packages.sh tcl curl libpython3-testsuite
	scripts/sampled-suites.sh $(FRAGPROF)

.PHONY: bench-surfaces
bench-surfaces: deps ## the figures of /metrics, the history and top
	$(CARGO) test --test integration figures_of_the_surfaces -- --ignored --nocapture

.PHONY: man
man: build ## man pages and completions into target/man
	$(FRAGPROF) man target/man
	$(FRAGPROF) completions bash > target/man/fragprof.bash
	$(FRAGPROF) completions zsh > target/man/_fragprof
	$(FRAGPROF) completions fish > target/man/fragprof.fish

.PHONY: verifier
verifier: deps ## instructions the kernel's verifier counts for each program
	$(CARGO) test --test integration the_verifier_needs -- --nocapture

.PHONY: cost-of-a-walk
cost-of-a-walk: deps ## what a stack costs in the kernel, a frame
	$(CARGO) test --test integration cost_of_a_walk -- --ignored --nocapture

.PHONY: kernel-matrix
kernel-matrix: test-deps ## Debian's kernels 5.10, 6.1, 6.12 and newest, x86-64 and arm64, in emulation; writes docs/kernels.md
	@scripts/install-packages.sh qemu-system-x86 cpio kmod
	scripts/kernel-matrix.sh

.PHONY: test-arm64
test-arm64: test-deps ## arm64: the cross build, its unit tests in emulation (qemu-user), and the unwinder on recorded stacks
	scripts/test-arm64.sh

.PHONY: allocator-matrix
allocator-matrix: test-deps ## C libraries, allocators and languages against the truth; writes docs/allocators.md
	scripts/allocator-matrix.sh

.PHONY: truth
truth: test-deps ## programs from packages against ledgers preloaded into them (PROGRAMS=redis,perl: those alone), half an hour; writes docs/truth.md
	scripts/truth-matrix.sh

.PHONY: faults
faults: test-deps ## the long forms of the fault tests: a thousand killed recorders, ten thousand threads
	$(CARGO) test --test integration faults:: -- --include-ignored --test-threads=1 --skip soak

# Seconds of `make soak`, for example `make soak SECONDS=7200`.
SECONDS ?= 600
.PHONY: soak
soak: test-deps ## targets that come and go for ten minutes (SECONDS=…): nothing grows, the ledger stays true
	FRAGPROF_SOAK_SECONDS=$(SECONDS) $(CARGO) test --test integration faults::soak -- --ignored --nocapture

# Seconds for each fuzz target.
FUZZ_SECONDS ?= 60
.PHONY: fuzz
fuzz: deps ## every reader of foreign bytes, FUZZ_SECONDS=… each; needs cargo-fuzz and a nightly toolchain
	@command -v cargo-fuzz >/dev/null || { echo "cargo-fuzz is not installed: cargo install --locked cargo-fuzz" >&2; exit 1; }
	for target in $$(cargo fuzz list); do $(CARGO) +nightly fuzz run $$target -- -max_total_time=$(FUZZ_SECONDS) || exit 1; done

# Requests that schemathesis makes for each path.
EXAMPLES ?= 100
.PHONY: fuzz-http
fuzz-http: test-deps ## requests that schemathesis makes from the description of the API, against a running agent
	@scripts/install-packages.sh python3-venv
	$(CARGO) build
	EXAMPLES=$(EXAMPLES) scripts/fuzz-http.sh target/debug/fragprof

.PHONY: deny
deny: ## licences, sources and advisories of everything that is linked (deny.toml)
	@command -v cargo-deny >/dev/null || { echo "cargo-deny is not installed: cargo install --locked cargo-deny" >&2; exit 1; }
	$(CARGO) deny --all-features check

.PHONY: release
release: deps ## the static binary, built twice and compared, with SBOM, in target/dist
	scripts/release.sh

.PHONY: bench-pages
bench-pages: test-deps ## time of a page to its contents, 200 processes and 24 h of history
	$(CARGO) test --test integration time_to_the_contents -- --ignored --nocapture

.PHONY: screenshots
screenshots: test-deps ## the pictures of docs/pages.md, from a real run
	$(CARGO) test --test integration screenshots_of_a_real_run -- --ignored --nocapture
