# fragprof's make targets. `make help` lists them.

CARGO ?= cargo
FRAGPROF := target/release/fragprof
TARGET := $(shell uname -m)-unknown-linux-gnu
STATIC := target/$(TARGET)/dist/fragprof
STATIC_ARM64 := target/aarch64-unknown-linux-gnu/dist/fragprof
IMAGE ?= localhost/fragprof:$(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
CONTAINER_PACKAGES := podman runc containerd buildah docker.io busybox-static
# What the build and the demo need in addition to Rust; the tests also need TEST_PACKAGES.
BUILD_PACKAGES := clang gcc g++ make pkg-config libelf-dev zlib1g-dev linux-libc-dev
TEST_PACKAGES := redis-server nginx-light redis-tools libjemalloc2 libjemalloc-dev libtcmalloc-minimal4 libgoogle-perftools-dev libmimalloc2.0 \
	libmimalloc-dev musl-tools busybox-static gdb valgrind binutils default-jdk-headless nodejs python3 golang-go php-cli ruby util-linux protobuf-compiler prometheus openssl podman runc containerd chromium fonts-dejavu-core systemtap-sdt-dev sqlite3 gawk perl postgresql heaptrack \
	strace systemd gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static

.PHONY: help
help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 18

.PHONY: deps
deps: ## install what the build needs
	@scripts/install-packages.sh $(BUILD_PACKAGES)

.PHONY: test-deps
test-deps: deps ## install what the tests need
	@scripts/install-packages.sh $(TEST_PACKAGES)
	@scripts/fetch-suite.sh trixie target/containerd containerd || echo "no containerd with NRI: delivery to containers is not tested" >&2
	@go tool pprof -h >/dev/null 2>&1 || true # newer Go builds it at first use, for which a test should not wait

.PHONY: build
build: deps ## build the release binary
	$(CARGO) build --release

.PHONY: demo
demo: build ## show the main features on a small service that leaks and fragments
	demo/run.sh $(FRAGPROF)

.PHONY: test
test: ## run everything: formatting, lints, unit, property and integration tests
	@CARGO="$(CARGO)" scripts/run-tests.sh

.PHONY: test-containers
test-containers: deps static ## test in real containers with the static image, and with each image builder
	@scripts/install-packages.sh $(CONTAINER_PACKAGES)
	@scripts/fetch-suite.sh trixie target/containerd containerd
	FRAGPROF_IMAGE_PROGRAM=$(CURDIR)/$(STATIC) $(CARGO) test --test integration containers:: -- --test-threads=2
	scripts/test-image.sh $(STATIC)

.PHONY: static
static: deps ## build one static binary, for any Linux of this architecture
	RUSTFLAGS="$$(scripts/static-flags.sh)" LIBBPF_SYS_LIBRARY_PATH=$$(scripts/library-path.sh) \
		$(CARGO) build --profile dist --features static --target $(TARGET) --bin fragprof
	@file $(STATIC) 2>/dev/null || true

.PHONY: image
image: static ## build the agent's image, with podman, buildah or docker
	scripts/build-image.sh $(STATIC) $(IMAGE)

.PHONY: static-arm64
static-arm64: deps ## build the static binary for arm64, with the cross compiler
	. scripts/arm64-toolchain.sh && RUSTFLAGS="$$(scripts/static-flags.sh)" LIBBPF_SYS_LIBRARY_PATH=/usr/lib/aarch64-linux-gnu \
		$(CARGO) build --profile dist --features static --target $$target --bin fragprof

.PHONY: images
images: static static-arm64 ## build the image for x86-64 and arm64 under one name, with podman or buildah
	scripts/build-images.sh $(IMAGE) $(STATIC) $(STATIC_ARM64)

.PHONY: manifests
manifests: ## render the plain Kubernetes manifests from the Helm chart
	scripts/render-manifests.sh

.PHONY: charts
charts: ## lint and render the Helm chart; installs helm with go if missing
	scripts/check-chart.sh

.PHONY: lint
lint: deps ## check formatting and clippy; warnings are errors
	$(CARGO) fmt --check
	$(CARGO) clippy --all-targets -- -D warnings

.PHONY: bench
bench: build ## measure the cost of exact mode, as ratios within one run
	$(FRAGPROF) bench

.PHONY: bench-governed
bench-governed: build test-deps ## measure what a budget of 1 % and the census cost four programs (45 minutes)
	benches/governed/run.sh $(FRAGPROF)

.PHONY: bench-node
bench-node: deps ## measure the agent on a node of 100 processes, 20 of them busy, with the governed tier on
	$(CARGO) test --release --test integration figures_of_a_node -- --ignored --nocapture

.PHONY: bench-session
bench-session: build test-deps ## measure the agent's memory and CPU time with three recordings at once
	scripts/bench-session.sh $(FRAGPROF)

.PHONY: soak-windows
soak-windows: deps ## open 2,000 windows on a busy process within its budget (an hour)
	$(CARGO) test --test integration two_thousand_windows -- --ignored --nocapture

.PHONY: cost-of-rare-events
cost-of-rare-events: deps ## measure the cost of observing first touches of pages and growth of the heap
	$(CARGO) test --test integration cost_of_rare_events -- --ignored --nocapture

.PHONY: coverage-windows
coverage-windows: test-deps ## record a program with phases in windows twenty times: how often the stated intervals hold (6 minutes)
	$(CARGO) test --test integration intervals_of_a_program_with_phases -- --ignored --nocapture

.PHONY: retention
retention: test-deps ## compare retention flags with a ledger preloaded into six real programs, on four allocators (5 minutes)
	$(CARGO) test --test integration no_retention_flag_of_six_real_programs_is_wrong_after -- --ignored --nocapture

.PHONY: verdicts
verdicts: test-deps ## verdicts on programs whose correct verdict is known: the table, and how often each confidence is right (10 minutes)
	$(CARGO) test --test integration table_of_verdicts -- --ignored --nocapture

.PHONY: bench-ledger
bench-ledger: deps ## measure the ledger
	$(CARGO) bench --bench ledger

.PHONY: bench-census
bench-census: test-deps ## measure the census, each figure with its goal
	$(CARGO) bench --bench census

.PHONY: bench-leaks
bench-leaks: deps ## measure leaks: look-ups, time per GiB, memory per block, slowdown of the target (BLOCKS=40000000: 10 GiB)
	$(CARGO) bench --bench leaks

.PHONY: coverage-leaks
coverage-leaks: test-deps ## find planted leaks among moving blocks, twenty times at each of three rates (15 minutes)
	$(CARGO) test --test integration leaks_are_found_twenty_times -- --ignored --nocapture

.PHONY: census-suites
census-suites: test-deps ## test the census and trims with every glibc and jemalloc of Debian's suites
	$(CARGO) test --test integration census::suites -- --ignored --nocapture --test-threads=2

.PHONY: jemalloc-test
jemalloc-test: test-deps ## build four releases of jemalloc, with two kinds of size classes, and test the census with them (10 minutes)
	scripts/jemalloc.sh

.PHONY: google-tcmalloc-test
google-tcmalloc-test: test-deps ## build Google's tcmalloc and test the census and recordings of programs on it (20 minutes)
	scripts/google-tcmalloc.sh

.PHONY: python-test
python-test: test-deps ## test the census of Python's heap, its frames and objects with the CPython of another Debian suite, 3.14 (10 minutes)
	scripts/python.sh

.PHONY: bench-unwind
bench-unwind: deps ## measure the unwind tables of every file under /usr
	$(CARGO) bench --bench unwind

.PHONY: bench-whatif
bench-whatif: test-deps ## compare predictions of whatif with programs really run so (PROGRAMS=perl,gdb: only those; 10 minutes); writes docs/whatif.md
	FRAGPROF_BLESS=1 $(CARGO) test --release --test integration figures_of_predictions -- --ignored --nocapture

.PHONY: bench-in-process
bench-in-process: deps ## measure a malloc/free pair recorded from inside, by probes and by heaptrack
	@scripts/install-packages.sh heaptrack
	$(CARGO) test --release --test integration a_pair_recorded_from_inside -- --ignored --nocapture

.PHONY: bench-sampler
bench-sampler: deps ## measure the in-process sampler: a pair, a sample and its free, real programs; compared with heaptrack
	@scripts/install-packages.sh heaptrack postgresql mariadb-server
	$(CARGO) test --release --test integration figures -- --ignored --nocapture --test-threads 1

.PHONY: bench-strata
bench-strata: test-deps ## compare sampling by call site with one distance for all, on redis, PostgreSQL, python and a JVM (6 minutes)
	@scripts/install-packages.sh postgresql
	$(CARGO) test --test integration errors_of_the_largest -- --ignored --nocapture

.PHONY: bench-attribution
bench-attribution: test-deps ## measure what share of a live heap has a stack: windows, attached and preloaded sampler (35 minutes; ATTRIBUTION_SECONDS=…: shorter)
	@scripts/install-packages.sh postgresql mariadb-server
	FRAGPROF_ATTRIBUTION_SECONDS=$(ATTRIBUTION_SECONDS) $(CARGO) test --test integration share_of_the_live_heap -- --ignored --nocapture

ATTRIBUTION_SECONDS ?= 300

.PHONY: coverage-sampled
coverage-sampled: deps ## record an emitter a hundred times: how often the stated intervals hold
	$(CARGO) test --test integration within_its_stated_interval_a_hundred_times -- --ignored --nocapture

.PHONY: stress-sampler
stress-sampler: deps ## take a week's worth of samples in a few minutes, and check that nothing is left behind in the process
	$(CARGO) test --test integration a_weeks_worth_of_samples -- --ignored --nocapture

.PHONY: stress-trim
stress-trim: test-deps ## make thousands of trims of a program that checks itself, and kill the command at every step and at random (10 minutes)
	$(CARGO) test --test integration a_program_that_checks_itself_survives_thousands -- --ignored --nocapture

.PHONY: bench-trim
bench-trim: test-deps ## compare trims with what was predicted: bytes, the stall of each arena, the stop of the one thread (10 minutes)
	$(CARGO) test --release --test integration figures_of_trims -- --ignored --nocapture

# Seconds of `make reclaim-node`.
RECLAIM_SECONDS ?= 3600
.PHONY: reclaim-node
reclaim-node: test-deps ## run the agent's [reclaim] on a node with ten services for an hour (RECLAIM_SECONDS=…): what it gave back, and their p99
	FRAGPROF_RECLAIM_SECONDS=$(RECLAIM_SECONDS) $(CARGO) test --test integration ten_services -- --ignored --nocapture

.PHONY: sampled-suites
sampled-suites: build test-deps ## run the test suites of CPython and Redis with the sampler and a consumer
	@scripts/install-packages.sh tcl curl libpython3-testsuite
	scripts/sampled-suites.sh $(FRAGPROF)

.PHONY: bench-surfaces
bench-surfaces: deps ## measure /metrics, the history and top
	$(CARGO) test --test integration figures_of_the_surfaces -- --ignored --nocapture

.PHONY: man
man: build ## write man pages and completions to target/man
	$(FRAGPROF) man target/man
	$(FRAGPROF) completions bash > target/man/fragprof.bash
	$(FRAGPROF) completions zsh > target/man/_fragprof
	$(FRAGPROF) completions fish > target/man/fragprof.fish

.PHONY: verifier
verifier: deps ## show the verifier's instruction count of each BPF program
	$(CARGO) test --test integration the_verifier_needs -- --nocapture

.PHONY: cost-of-a-walk
cost-of-a-walk: deps ## measure the cost of a stack in the kernel, per frame
	$(CARGO) test --test integration cost_of_a_walk -- --ignored --nocapture

.PHONY: cost-of-managed-frames
cost-of-managed-frames: test-deps ## measure the cost of Java and Python frames in the kernel
	$(CARGO) test --test integration cost_of_managed_frames -- --ignored --nocapture

.PHONY: bench-managed
bench-managed: build test-deps ## measure exact mode with Java and Python frames, as ratios to empty probes within one run
	@mkdir -p target/bench-managed && javac -d target/bench-managed benches/managed/Frames.java
	$(FRAGPROF) bench --rounds 3 -- java -cp target/bench-managed Frames 1000000 20
	$(FRAGPROF) bench --rounds 3 -- /usr/bin/python3 benches/managed/frames.py 80000 20

.PHONY: python-objects
python-objects: test-deps ## compare recorded objects with sys.getsizeof, in every CPython on the machine (FRAGPROF_TEST_PYTHON=a:b: those too)
	$(CARGO) test --test integration objects_of_every_python -- --ignored --nocapture

# RocksDB for Java, of which the native library for x86-64 is a file of its own.
ROCKSDB ?= 10.10.1
.PHONY: proof-rocksdb
proof-rocksdb: test-deps ## compare live bytes under RocksDB in a JVM with its own counters; fetches the library with maven
	@scripts/install-packages.sh maven
	mvn -q -B org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy -Dartifact=org.rocksdb:rocksdbjni:$(ROCKSDB):jar:linux64 \
		-DoutputDirectory=$(CURDIR)/target/rocksdb
	FRAGPROF_ROCKSDB_JAR=$(CURDIR)/target/rocksdb/rocksdbjni-$(ROCKSDB)-linux64.jar \
		$(CARGO) test --test integration live_bytes_under_rocksdb -- --ignored --nocapture

.PHONY: kernel-matrix
kernel-matrix: test-deps ## test Debian's kernels 5.10, 6.1, 6.12 and newest, x86-64 and arm64, in emulation; writes docs/kernels.md
	@scripts/install-packages.sh qemu-system-x86 cpio kmod
	scripts/kernel-matrix.sh

.PHONY: test-arm64
test-arm64: test-deps ## test arm64: the cross build, its unit tests in emulation (qemu-user), and the unwinder on recorded stacks
	scripts/test-arm64.sh

.PHONY: allocator-matrix
allocator-matrix: test-deps ## compare C libraries, allocators and languages with independent accounts; writes docs/allocators.md
	scripts/allocator-matrix.sh

.PHONY: truth
truth: test-deps ## compare packaged programs with ledgers preloaded into them (PROGRAMS=redis,perl: only those; 30 minutes); writes docs/truth.md
	scripts/truth-matrix.sh

.PHONY: faults
faults: test-deps ## run the long fault tests: a thousand killed recorders, ten thousand threads, thousands of trims (TRIM_CALLS=… TRIM_KILLS=…)
	$(CARGO) test --test integration faults:: -- --include-ignored --test-threads=1 --skip soak
	$(MAKE) faults-trim faults-attach

# Calls of `make faults-trim`, and how often the command is killed meanwhile.
TRIM_CALLS ?= 3000
TRIM_KILLS ?= 1000
.PHONY: faults-trim
faults-trim: test-deps ## make 3,000 trims in thirteen programs, and kill the command 1,000 times: prints a table (40 minutes)
	FRAGPROF_TRIM_CALLS=$(TRIM_CALLS) FRAGPROF_TRIM_KILLS=$(TRIM_KILLS) \
		$(CARGO) test --test integration thousands_of_calls_in_real_programs -- --ignored --nocapture

# Commands of `make faults-attach`, attaching and detaching in turn, and how often they are killed meanwhile.
ATTACH_CALLS ?= 3000
ATTACH_KILLS ?= 1000
.PHONY: faults-attach
faults-attach: test-deps ## attach and detach the sampler 3,000 times in thirteen programs, and kill the command 1,000 times: prints a table (30 minutes)
	FRAGPROF_ATTACH_CALLS=$(ATTACH_CALLS) FRAGPROF_ATTACH_KILLS=$(ATTACH_KILLS) \
		$(CARGO) test --test integration thousands_of_cycles_in_real_programs -- --ignored --nocapture
	FRAGPROF_RECORDINGS=200 $(CARGO) test --test integration real_programs_go_on_after_recordings -- --nocapture

# Seconds of `make soak`, for example `make soak SECONDS=7200`.
SECONDS ?= 600
.PHONY: soak
soak: test-deps ## watch targets that come and go for ten minutes (SECONDS=…): nothing grows, the ledger stays correct
	FRAGPROF_SOAK_SECONDS=$(SECONDS) $(CARGO) test --test integration faults::soak -- --ignored --nocapture

# Seconds per fuzz target. Inputs that are found go to target/fuzz; fuzz/corpus has those that the targets begin with.
FUZZ_SECONDS ?= 60
.PHONY: fuzz
fuzz: deps ## fuzz every reader of untrusted data, FUZZ_SECONDS=… each; needs cargo-fuzz and a nightly toolchain
	@command -v cargo-fuzz >/dev/null || { echo "cargo-fuzz is not installed: cargo install --locked cargo-fuzz" >&2; exit 1; }
	for target in $$(cargo fuzz list); do \
		mkdir -p target/fuzz/$$target; \
		$(CARGO) +nightly fuzz run $$target target/fuzz/$$target fuzz/corpus/$$target -- -max_total_time=$(FUZZ_SECONDS) || exit 1; \
	done

# Requests that schemathesis generates per path.
EXAMPLES ?= 100
.PHONY: fuzz-http
fuzz-http: test-deps ## test a running agent with requests that schemathesis generates from the API's description
	@scripts/install-packages.sh python3-venv
	$(CARGO) build
	EXAMPLES=$(EXAMPLES) scripts/fuzz-http.sh target/debug/fragprof

.PHONY: deny
deny: ## check licences, sources and advisories of all dependencies (deny.toml)
	@command -v cargo-deny >/dev/null || { echo "cargo-deny is not installed: cargo install --locked cargo-deny" >&2; exit 1; }
	$(CARGO) deny --all-features check

.PHONY: release
release: deps ## build the static binary twice, compare, and write it with its SBOM to target/dist
	scripts/release.sh

.PHONY: bench-pages
bench-pages: test-deps ## measure the time until a page shows its contents, 200 processes and 24 h of history
	$(CARGO) test --test integration time_to_the_contents -- --ignored --nocapture

.PHONY: screenshots
screenshots: test-deps ## take the screenshots of docs/pages.md from a real run
	$(CARGO) test --test integration screenshots_of_a_real_run -- --ignored --nocapture

.PHONY: bench-fleet
bench-fleet: test-deps ## measure the cluster dashboard and top --prometheus with a thousand simulated agents (5 minutes)
	$(CARGO) test --test integration a_thousand_agents_are_seen -- --ignored --nocapture

.PHONY: test-sql
test-sql: ## read exported tables with DuckDB, and run the queries of docs/sql.md (installs DuckDB in target/duckdb)
	test -x target/duckdb/bin/python || { python3 -m venv target/duckdb && target/duckdb/bin/pip install -q duckdb; }
	FRAGPROF_DUCKDB=$(CURDIR)/target/duckdb/bin/python $(CARGO) test --lib duckdb -- --ignored

.PHONY: bench-push
bench-push: deps ## measure the bytes and the CPU time of a day of pushes, of a node with fifty workloads
	$(CARGO) test --release --lib a_day_of_pushes -- --ignored --nocapture
