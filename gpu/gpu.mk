# Everything that has to do with GPUs, except how kernels are compiled, which kernels.mk says.
# None of it needs a GPU, and only a C compiler is assumed.

GPU_SDK := .gpu-sdk
CLANG_CUDA ?= clang++-19
# Any clang from 15 on builds the emulator: the one of the kernels, else the newest one here.
CLANG_HOST ?= $(or $(shell \
	for c in $(CLANG_CUDA) clang++ $(addprefix clang++-,22 21 20 18 17 16 15); do \
		v=$$($$c -dumpversion 2>/dev/null) && [ "$${v%%.*}" -ge 15 ] && echo $$c && break; \
	done),no-clang)
PIP_INSTALL := python3 -m pip install --quiet --disable-pip-version-check \
	--root-user-action ignore --no-deps
# Commands after it build with the SDK.
WITH_SDK := . ./$(GPU_SDK)/env &&

.PHONY: gpu-sdk gpu gpu-binaries gpu-test emulator gpu-emulated

# Prepare builds with GPU support: CUDA's headers, of a toolkit or downloaded, and a
# libcuda.a that opens the driver when it is first called.
gpu-sdk: $(GPU_SDK)/env

$(GPU_SDK)/env: $(wildcard internal/sdk/*.go internal/sdk/*/*) internal/sdk/requirements.txt \
		cmd/euryale/env.go
	@mkdir -p $(GPU_SDK)
	$(GO) run ./cmd/euryale env --dir $(GPU_SDK) > $@.new
	@mv $@.new $@

# Which files a package has.
FILES := {{.ImportPath}} {{.GoFiles}} {{.CgoFiles}} {{.TestGoFiles}} {{.XTestGoFiles}}
TAGGED = { CGO_ENABLED=0 $(GO) list -f '$(FILES)' ./... && \
	$(GO) list -tags gpu,mpi$(SHARED) -f '$(FILES)' ./...; } | \
	sort | uniq -u | cut -d' ' -f1 | sort -u

GPU_PROGRAMS ?= ./cmd/... ./examples/...

# Vet the packages that have other files with tags than make lint has vetted, and build the command
# and the examples (GPU_PROGRAMS) into bin/, with GPU support. What make mpi compiles is vetted,
# too. The tags are in GOFLAGS, as in .ci/run, and not among vet's arguments, by which it would take
# all that is imported again. Symbols for debuggers would be half of the linker's time.
gpu: export GOGC := 300
gpu: gpu-sdk
	$(WITH_SDK) GOFLAGS="$$($(GO) env GOFLAGS) -tags=gpu,mpi$(SHARED)" $(GO) vet $$($(TAGGED))
	@mkdir -p bin
	$(WITH_SDK) $(GO) build -tags gpu$(SHARED) -ldflags='-s -w' -o bin/ $(GPU_PROGRAMS)

GPU_TESTED := internal/jobs internal/kernels/cuda internal/cuda internal/gpu internal/hierarchy \
	backend/compress/sparse backend/compress/half internal/fault ops autograd layers vm fit \
	internal/bench models cmd/euryale

# Build what .ci/gpu runs on a machine with GPUs and without Go: the command, programs that train,
# and tests as programs. They are stripped, since they travel.
gpu-binaries: gpu-sdk
	@mkdir -p bin/test
	$(WITH_SDK) $(GO) build -tags gpu -ldflags='-s -w' -o bin/ \
		./cmd/euryale ./examples/digits ./examples/convnet ./bench/train \
		./examples/elastic ./internal/tools/immortal
	$(WITH_SDK) for dir in $(GPU_TESTED); do \
		$(GO) test -c -tags gpu -ldflags='-s -w' \
			-o bin/test/$$(echo $$dir | tr / -).test ./$$dir || exit 1; \
	done

# Run the tests with GPU support, where REQUIRE_GPU=1 makes a missing GPU a failure.
gpu-test: gpu-sdk
	$(WITH_SDK) $(GO) test -tags gpu -vet=off ./...

# Where the processor has it, a fused multiply-add is an instruction, not a call.
V3 := $(if $(shell grep -m 1 -w fma /proc/cpuinfo 2>/dev/null | grep -w avx2),-march=x86-64-v3)
EMULATOR_FLAGS := -std=c++17 -O1 -ffp-contract=off -fwrapv -fno-strict-aliasing -Wall \
	-Wno-unknown-pragmas -U_FORTIFY_SOURCE -fPIC -fvisibility-inlines-hidden $(V3)
# Where ccache is, it remembers what has been compiled, as the go command does.
CCACHE ?= $(shell command -v ccache)
EMULATE = $(CCACHE) $(CLANG_HOST) $(EMULATOR_FLAGS) -c -o
# A library of one source, flags for that, and objects and libraries.
EMULATE_ALL = $(EMULATE) $@.o $(1) $< && $(CLANG_HOST) -shared -o $@ $@.o $(2)
EMULATOR := $(addprefix bin/emulated/,libcuda.so.1 libnccl.so.2 old/libnccl.so.2 \
	libcublas.so.13 libcudnn.so.9)
KERNELS_OBJECT := bin/emulated/kernels.o

# Compile a driver, an NCCL, a cuBLAS and a cuDNN whose devices are the host, into bin/emulated.
# The kernels among them serve a test of internal/kernels/cuda, too, if EMULATED_KERNELS is the path
# of kernels.o.
emulator: $(EMULATOR) bin/emulated/ptx/all

$(KERNELS_OBJECT): internal/kernels/cuda/emulator/kernels.cpp gpu/gpu.mk \
		$(wildcard $(addprefix internal/kernels/cuda/,*.cu *.cuh emulator/*.h))
	@[ $(CLANG_HOST) != no-clang ] || { \
		echo 'make gpu-emulated: no clang++ from version 15 on is here: install one' \
			'(apt-get install clang), or name it: make gpu-emulated CLANG_HOST=...' >&2; exit 1; }
	@mkdir -p bin/emulated/old
	$(EMULATE) $@ $<

bin/emulated/libcuda.so.1: internal/kernels/cuda/emulator/libcuda.cpp $(KERNELS_OBJECT)
	$(call EMULATE_ALL,,$(KERNELS_OBJECT))

bin/emulated/libnccl.so.2: internal/gpu/emulator/libnccl.cpp $(KERNELS_OBJECT)
	$(call EMULATE_ALL,,-ldl)

bin/emulated/old/libnccl.so.2: internal/gpu/emulator/libnccl.cpp $(KERNELS_OBJECT)
	$(call EMULATE_ALL,-DOLD,-ldl)

bin/emulated/libcublas.so.13: internal/cuda/emulator/libcublas.cpp $(KERNELS_OBJECT)
	$(call EMULATE_ALL,,-ldl)

bin/emulated/libcudnn.so.9: internal/cuda/emulator/libcudnn.cpp $(KERNELS_OBJECT)
	$(call EMULATE_ALL,,-ldl)

# Not after the files that are read: they have rules of their own, which run always.
bin/emulated/ptx/all: internal/kernels/cuda/checked.sum
	@rm -rf $(@D) && mkdir -p $(@D)
	@for file in internal/kernels/cuda/*.ptx.gz; do \
		gzip -dc $$file >$(@D)/$$(basename $$file .gz) || exit 1; done
	@touch $@

# Beside tests of which a case is for GPUs, others run; those named ...OnHost are long, and examples
# and they are left out: make test runs them.
HOSTS_ALONE := ^Example|OnHost$$
# What is measured there is of no use to anybody.
DRIVER := LD_LIBRARY_PATH=$(CURDIR)/bin/emulated REQUIRE_GPU=1 EURYALE_TUNING=off
TESTS := bin/emulated/test
EMBEDDED := $(DRIVER) $(GO) test -vet=off -count 1 -tags gpu$(SHARED)
# Tests that are not of the embedded kernels read them from files that are not compressed: to
# decompress them for each device of each test took a sixth of the time.
FILES_OF_PTX := EURYALE_KERNELS=$(CURDIR)/bin/emulated/ptx
EMULATED := $(FILES_OF_PTX) $(EMBEDDED)
# Programs are left where AGAIN finds them.
KEPT := -o $(TESTS)/ -ldflags='-s -w'
# A test program that go test has run before, with other variables and tests: the folder of the
# package, these, and those. By go test it would be linked once more.
AGAIN = $(WITH_SDK) program=$(CURDIR)/$(TESTS)/$(notdir $(1)).test && \
	cd $(1) && { $(DRIVER) $(2) $$program -test.timeout 10m $(3) >$$program.out 2>&1 && \
	echo 'ok  	$(1), again: $(2)' || { cat $$program.out; echo 'FAIL	$(1): $(2)'; exit 1; }; }

# Run the GPU tests on a driver and an NCCL whose devices are the host, and those ...OffGPU, which
# are built with GPU support and ask for no GPU. Kernels do not reach the memory of another process
# there, so tests of that are left out, and so is what takes kernels that wait too long: minutes of
# calls back to back. Processes that share one device, as machines of their own, go by NCCL. Kernels
# of tests ...UnemulatedOnGPU take long, and others run their sources on the host.
gpu-emulated: export EMULATED_DEVICES ?= 2
gpu-emulated: export GOGC ?= 400
gpu-emulated: gpu-sdk emulator
	$(WITH_SDK) $(EMBEDDED) $(KEPT) -run '^TestGPU|OnGPU$$|OffGPU$$' \
		-skip 'UnemulatedOnGPU$$' ./internal/kernels/cuda ./cmd/euryale
	@$(call AGAIN,internal/kernels/cuda,EMULATED_CAPABILITY=70,-test.short \
		-test.run '^TestGPUVariants')
	$(WITH_SDK) $(EMULATED) $(KEPT) \
		-run '^TestNCCL.*OnGPU$$|^TestKernels.*OnGPU$$|OffGPU$$' \
		./internal/gpu ./internal/gpu/nvml
	@$(call AGAIN,internal/gpu,EMULATED_DEVICES=1 $(FILES_OF_PTX),-test.run \
		'^TestKilledRankOfAnotherMachineIsNamed$$')
	@$(call AGAIN,internal/gpu,EURYALE_NCCL=$(CURDIR)/bin/emulated/old $(FILES_OF_PTX),-test.run \
		'^TestLibraryThatIsOld|^TestNCCLAbort')
	@$(call AGAIN,internal/gpu,$(FILES_OF_PTX),-test.short -test.skip \
		'^TestGraphs$$|Unraced$$' -test.run '^TestAlgorithms|^TestGraphs|^TestCop')
	@$(call AGAIN,internal/gpu,EMULATED_CAPABILITY=70,-test.short -test.run '^TestAlgorithms')
	$(WITH_SDK) $(EMULATED) -run 'OnGPU$$' -skip '^TestMachines' ./internal/hierarchy
	$(WITH_SDK) $(EMULATED) -run '/.*gpu' -skip '$(HOSTS_ALONE)' \
		./backend/compress/sparse ./backend/compress/half ./internal/fault
	$(WITH_SDK) $(EMBEDDED) ./internal/cuda
	$(WITH_SDK) $(EMULATED) -run '/.*gpu' -skip '^TestProcesses|^TestKilled|$(HOSTS_ALONE)' \
		./ops ./autograd ./layers
	$(WITH_SDK) $(EMULATED) $(KEPT) -run 'OnGPU$$' ./vm ./fit ./models
	@$(call AGAIN,vm,EMULATED_DEVICES=1 $(FILES_OF_PTX),-test.run '^TestKilledProcess$$')
	$(WITH_SDK) $(EMULATED) $(KEPT) -short -run 'OnGPU$$' -skip '^TestAKilledProcess' \
		./internal/jobs
	@$(call AGAIN,internal/jobs,EURYALE_LOWLATENCY=off $(FILES_OF_PTX),-test.run \
		'^TestAKilledProcess.*OnGPU$$')
