# Everything a developer runs. `make demo` and `make test` are the two to know.

GO ?= go
FUZZ ?= Fuzz
FUZZTIME ?= 20s
MINUTES ?= 5
SEED ?= 1
JOB ?=
STATICCHECK_VERSION := v0.8.2
GOVULNCHECK_VERSION := v1.9.0
VULN_DB ?= https://vuln.go.dev

BLAS ?=
# More tags of builds with cgo. With ",netgo,osusergo" they share most packages with builds without.
SHARED ?=

.PHONY: demo test test-full systems portable arm64 race unraced fuzz netns names manifests soak \
	immortal stock-tests bench bench-blas size mpi lint vuln help

# Train the digits example on two ranks, which are processes of this machine.
demo:
	$(GO) run ./cmd/euryale run -n 2 ./examples/digits

# Run every test on a sample of its cases, as before a commit. Vetting is make lint's. To collect
# their small heaps as often as other targets do would take vm and autograd a third of their time.
# Package vm takes longest, so it comes first: the last one has no other beside it.
test: export GOGC ?= 400
test:
	$(GO) test -vet=off ./vm ./...

# Run every test on the full product of its cases, all of them under the race detector, and the
# fuzz tests for longer, as before a release. Each part is a target, too, as in make full-gpu; all
# run even if one fails, and a list of them is printed at the end.
test-full:
	@status=0; report=; for part in $(FULL_PARTS); do \
		began=$$(date +%s); verdict=passed; \
		$(MAKE) --no-print-directory $$part || { verdict=FAILED; status=1; }; \
		report="$$report$$part $$verdict after $$(($$(date +%s) - began)) s\n"; \
	done; printf "\ntest-full ran:\n$$report"; exit $$status

FULL_PARTS := full-kernels full-host full-gpu full-backends full-rest full-race full-fuzz arm64 \
	full-systems
FULL := EURYALE_FULL=1 $(GO) test -vet=off -timeout 30m

full-kernels:
	$(FULL) ./kernels/... ./internal/kernels/...

full-host:
	$(FULL) ./backend/host ./backend/backendtest/...

full-gpu:
	$(FULL) ./internal/gpu ./internal/hierarchy

full-backends:
	$(FULL) $$($(GO) list ./backend/... | grep -vE '/backend/(host|backendtest)(/|$$)')

full-rest:
	$(FULL) $$($(GO) list ./... | \
		grep -vE '/euryale/(backend|kernels|internal/(gpu|hierarchy|kernels))(/|$$)')

full-race:
	$(GO) test -race -short -vet=off -timeout 30m ./...

full-fuzz:
	$(MAKE) fuzz FUZZTIME=5000x

full-systems:
	@for system in $(SYSTEMS); do echo "GOOS/GOARCH $$system: go vet"; \
		GOOS=$${system%/*} GOARCH=$${system#*/} CGO_ENABLED=0 $(GO) vet ./... || exit 1; done
	$(GO) test -short -vet=off -tags portable ./backend/host ./backend/tcp ./internal/hierarchy
	$(GO) test -short -vet=off -tags netconn ./backend/tcp

SYSTEMS := darwin/arm64 darwin/amd64 windows/amd64 freebsd/amd64 linux/arm64

# Check that the module compiles for the other systems where it works: its types and its assembly.
# In test-full it is compiled for them, and vetted, with its tests.
systems: export GOGC := 400
systems:
	$(GO) run ./internal/tools/systems $(SYSTEMS)

# Test on this system what other systems run in place of Linux's calls.
portable:
	$(GO) test -short -vet=off -tags portable$(SHARED) \
		./internal/shm ./internal/group ./internal/session
	$(GO) test -short -vet=off -tags portable$(SHARED) -run '/P=2/' ./backend/host
	for tag in portable netconn; do SUITE=raced \
		$(GO) test -short -vet=off -tags $$tag$(SHARED) \
			-skip 'Unraced$$|^TestEncryptedCommunicator' ./backend/tcp || exit 1; \
	done

# Test on an emulated arm64 (Debian: qemu-user) what computes, where loops in Go take the place of
# assembly, and jobs of processes: sockets, the group, the launcher. Tests ...Unemulated build
# programs for the machine, or trace a process, which the emulator cannot do. Of sockets and jobs
# those ...Emulated are enough, and groups of 3 and 4.
arm64: export GOARCH := arm64
arm64: EMULATED := $(GO) test -short -vet=off -timeout 30m \
	-exec "$(CURDIR)/internal/testing/emulated.sh"
arm64:
	$(EMULATED) ./kernels/... ./internal/kernels/... ./internal/workers ./vm ./internal/vm/...
	$(EMULATED) -skip 'Unemulated$$' ./internal/launch ./internal/group ./internal/session
	SUITE=raced $(EMULATED) -run 'Emulated$$|^TestCommunicator$$' ./backend/tcp ./internal/jobs

# Where a test runs follows from its package and its name. A package with concurrency has a file
# race_test.go, which only builds for the race detector have: make race runs its tests, except those
# ...Unraced, which compare many values of what others run, too, or whom processes name. Elsewhere
# make race runs the tests ...Raced, and the examples beside them, since they overlap what they do.
# Of its suite package backendtest chooses what each target runs, by SUITE.
PACKAGES = $$($(GO) list -f '{{.ImportPath}} {{.IgnoredGoFiles}}' ./... | \
	grep $(1) '[[ ]race_test\.go' | cut -d ' ' -f 1)
# Folders of tests with an end of a name, of those with that file, or with ! as $(2) of the others.
FOLDERS = $$(grep -rlE --include='*_test.go' '^func Test\w*$(1)\(' . | xargs dirname | sort -u | \
	while read -r dir; do [ $(2) -e $$dir/race_test.go ] && echo $$dir; done)

# Run the tests of packages with concurrency under the race detector. Each test program would sleep
# for a second at its end without atexit_sleep_ms=0.
race: export GORACE := atexit_sleep_ms=0
race: export CGO_ENABLED := 1
race: export SUITE := raced
race:
	$(GO) test -race -short -vet=off -timeout 30m -skip 'Unraced$$' $(call PACKAGES,)
	$(GO) test -race -short -vet=off -run '^Example|Raced$$' $(call FOLDERS,Raced,!)

# Run what make race has not run whole. Together the two cover make test, except how
# groups of 8 end: a test that has passed under the race detector says nothing new without it.
unraced: export GOGC ?= 400
unraced: export SUITE := unraced
unraced:
	$(GO) test -vet=off ./vm $(call PACKAGES,-v)
	$(GO) test -vet=off -run 'Unraced$$|^Test.*Communicator' \
		$(call FOLDERS,(Unraced|Communicator\w*),)

# Run each fuzz test for a while (FUZZTIME): they try the decoders of what a network sends.
fuzz:
	@set -e; grep -rEo --include='*_test.go' '^func ($(FUZZ))\w*' . | sort | \
	while IFS=': ' read -r file _ name; do \
		echo "$$file $$name"; \
		$(GO) test -run '^$$' -fuzz "^$$name\$$" -fuzztime $(FUZZTIME) $$(dirname $$file); \
	done

# Run jobs of two and three machines, which are network namespaces (as root): over slow and lossy
# wires, with every loss of a rank, a launcher, a machine or a link; and started by ssh, which takes
# openssh-server. The last line counts failures.
netns:
	@REQUIRE_NETNS=1 $(FULL) -count 1 -v -run '^TestMachines|BetweenNetworks$$' \
		./cmd/euryale ./internal/group 2>&1 | awk ' \
		{ print } /--- FAIL|^FAIL\t/ { failures++ } \
		match($$0, /[0-9]+_machines/) { \
			n = substr($$0, RSTART, RLENGTH) + 0; if (n > machines) machines = n } \
		END { printf "machines=%d failures=%d\n", machines, failures; exit !machines || failures }'

# Stop 200 ranks and kill 200, of jobs on three machines of two ranks each, while other programs
# want the cores. All other ranks must name the right one: a killed one within a second, a stopped
# one a second after EURYALE_TIMEOUT.
names:
	@REQUIRE_NETNS=1 NAMES=200 $(FULL) -count 1 -v -parallel 4 \
		-run '^TestTheLostRankIsNamedOnMachinesUnderLoad' ./internal/jobs 2>&1 | \
		grep -E 'names_test|--- FAIL|^(ok|FAIL)|stops='

# Check the manifests of examples/cluster by the types of Kubernetes' API.
manifests:
	@cd examples/cluster/check && $(GO) run . ../*.yaml

# Run random jobs with random failures for MINUTES, where SEED=1 JOB=17 repeats one of them.
soak:
	@$(GO) run ./internal/tools/soak -minutes $(MINUTES) -seed $(SEED) $(if $(JOB),-job $(JOB))

# Kill random processes of elastic jobs for MINUTES, and compare their steps with those of a job in
# which nobody dies. MODEL=gpt RANKS=8 says what they train; MACHINES=3 needs root. With CUTS=2
# every second strike cuts a link between two machines in place of that.
immortal:
	@$(GO) run ./internal/tools/immortal -minutes $(MINUTES) -seed $(SEED) \
		$(if $(RANKS),-n $(RANKS)) $(if $(MODEL),-model $(MODEL)) \
		$(if $(MACHINES),-machines $(MACHINES)) $(if $(CUTS),-cuts $(CUTS) -timeout 3s)

# Run Gorgonia's own tests through package vm, and print what differs. It needs the module proxy.
stock-tests:
	@$(GO) run ./internal/tools/stocktests

# Time all-reduces among two and four processes, and the kernels.
bench:
	$(GO) run ./cmd/euryale bench -n 2
	$(GO) run ./cmd/euryale bench -n 4
	$(GO) test -run '^$$' -bench . -benchmem ./internal/kernels ./backend/host

# Compare matrix multiplications with OpenBLAS's, in turns on the same cores (BLAS='-only nn -rounds
# 3'), and exp with Gorgonia's.
bench-blas:
	@$(GO) run ./bench/blas $(BLAS)

# Print the size of the module by a fixed rule, and compare it with the file of numbers.
size:
	$(GO) run ./internal/tools/size

# Test with MPI: Open MPI and MPICH where they are installed, and the one in MPI_HOME if it is set.
# Vetting is make gpu's.
mpi: export CGO_ENABLED := 1
mpi:
	$(GO) test -tags mpi$(SHARED) -vet=off -count 1 ./backend/mpi

# Check formatting, size, vet, staticcheck and the build without cgo. Packages are compiled, and one
# program is linked, not all. Less collection of garbage takes a third off staticcheck's time.
lint: export CGO_ENABLED := 0
lint: export GOGC := 300
lint:
	@unformatted=$$(gofmt -l .); test -z "$$unformatted" \
		|| { echo "gofmt wants:"; echo "$$unformatted"; exit 1; }
	$(GO) run ./internal/tools/size
	$(GO) vet ./...
	$(GO) list -export ./... >/dev/null
	$(GO) build -o /dev/null ./cmd/euryale
	$(GO) run honnef.co/go/tools/cmd/staticcheck@$(STATICCHECK_VERSION) ./...

# Look for known vulnerabilities in what the modules call, where their database (VULN_DB) can be
# reached: elsewhere nothing is checked, which REQUIRE_VULN=1 makes a failure.
vuln:
	@status=0; for module in . $(SIMD)/gen examples/cluster/check; do \
		text=$$($(GO) -C $$module run golang.org/x/vuln/cmd/govulncheck@$(GOVULNCHECK_VERSION) \
			-db $(VULN_DB) ./... 2>&1) || status=1; \
		case $$text in *'fetching vulnerabilities: '*) \
			echo "make vuln: nothing is checked: $(VULN_DB) cannot be reached: $${text##*: }" | \
				head -1; exit $${REQUIRE_VULN:-0} ;; esac; \
		printf '%s\n' "$$module: $$text"; \
	done; exit $$status

# List the targets, each with the first sentence of the comment right above it.
help:
	@awk '/^# / { text = text (text ? " " : "") substr($$0, 3); next } \
		/^[a-z0-9-]+:/ && text { sub(":.*", ""); match(text, /\.( |$$)/); \
			printf "%-13s %s\n", $$0, substr(text, 1, RSTART) } \
		{ text = "" }' $(MAKEFILE_LIST)

include gpu/gpu.mk internal/kernels/cuda/kernels.mk internal/kernels/simd/simd.mk
