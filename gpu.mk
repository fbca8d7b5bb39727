# Everything that has to do with GPUs. None of it needs a GPU, and only a C
# compiler is assumed; `ptx` needs clang.

GPU_SDK := .gpu-sdk
CLANG_CUDA ?= clang++-19
CLANG_HOST ?= $(CLANG_CUDA)
PIP_INSTALL := python3 -m pip install --quiet --disable-pip-version-check --root-user-action ignore --no-deps
PTX_BASE := $(patsubst %.cu,%.ptx,$(wildcard kernels/cuda/*.cu))
PTX_NEWER := $(patsubst %,kernels/cuda/%.ptx,allreduce.sm_80 gather.sm_80 ll128.sm_80 sparse.sm_80 allreduce.sm_90 sparse.sm_90)
PTX := $(PTX_BASE) $(PTX_NEWER)

# One GPU architecture: what later ones run too; and newer ones where their instructions
# pay. Fused multiply-adds are written where they are meant, so that results are those of
# the host.
kernels/cuda/%.ptx: ARCHITECTURE := sm_70
kernels/cuda/%.sm_80.ptx: ARCHITECTURE := sm_80
kernels/cuda/%.sm_90.ptx: ARCHITECTURE := sm_90
CLANG_CUDA_FLAGS = -x cuda --cuda-device-only --cuda-gpu-arch=$(ARCHITECTURE) -nocudainc -nocudalib \
	-std=c++17 -O3 -ffp-contract=off -Wall -Wextra -Werror

.PHONY: gpu-sdk ptx ptx-check nvcc gpu gpu-binaries gpu-test gpu-emulated always

# Prepare builds with GPU support: CUDA's headers, of a toolkit or downloaded, and a
# libcuda.a that opens the driver when it is first called.
gpu-sdk: $(GPU_SDK)/env

$(GPU_SDK)/env: $(wildcard gpu/sdk/*.go gpu/sdk/*/*) gpu/sdk/requirements.txt cmd/euryale/env.go
	@mkdir -p $(GPU_SDK)
	$(GO) run ./cmd/euryale env --dir $(GPU_SDK) > $@.new
	@mv $@.new $@

# Compile all kernels to the PTX that is committed. All, because a checkout keeps no times.
ptx: $(PTX)

define compile-ptx
	@tmp=$$(mktemp) && trap 'rm -f $$tmp' EXIT && \
	$(CLANG_CUDA) $(CLANG_CUDA_FLAGS) -S -o $$tmp $< && \
	{ echo "// Code generated from $(<F) by clang $$($(CLANG_CUDA) -dumpversion); DO NOT EDIT."; \
	  sed -e 's,[[:space:]]*//.*,,' -e '/^[[:space:]]*$$/d' $$tmp; } > $@
	@echo "$@"
endef

kernels/cuda/%.ptx: kernels/cuda/%.cu always
	$(compile-ptx)

kernels/cuda/%.sm_80.ptx: kernels/cuda/%.cu always
	$(compile-ptx)

kernels/cuda/%.sm_90.ptx: kernels/cuda/%.cu always
	$(compile-ptx)

# CUDA 12 has the last ptxas for compute capability 7.0.
PTXAS_WHEEL := nvidia-cuda-nvcc-cu12==12.8.93
PTXAS := $(GPU_SDK)/ptxas/nvidia/cuda_nvcc/bin/ptxas

# Assemble the committed PTX for the devices that it is for: ptxas refuses instructions that
# they lack.
ptx-check:
	@[ -x $(PTXAS) ] || $(PIP_INSTALL) --target $(GPU_SDK)/ptxas $(PTXAS_WHEEL)
	@{ printf -- '-arch=sm_%s %s\n' $(foreach ptx,$(PTX_BASE),70 $(ptx) 75 $(ptx)); \
	   printf '%s\n' $(PTX_NEWER) | sed 's,.*\.\(sm_[0-9]*\)\.ptx,-arch=\1 &,'; } | \
		xargs -P "$$(nproc)" -L 1 $(PTXAS) -o /dev/null

NVCC_WHEELS := nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-cuda-runtime==13.0.96
NVCC := nvcc -ptx -std=c++17 -O3 -fmad=false -Werror all-warnings

# Compile the kernels with nvcc, of a toolkit or of NVIDIA's wheels, into bin/nvcc, for
# .ci/gpu to compare on a GPU. CUDA 13 compiles for compute capability 7.5 and newer.
nvcc:
	@mkdir -p $(GPU_SDK)/nvcc bin/nvcc
	@command -v nvcc >/dev/null || [ -d $(GPU_SDK)/nvcc/nvidia ] || \
		$(PIP_INSTALL) --target $(GPU_SDK)/nvcc $(NVCC_WHEELS)
	@export PATH="$$PATH:$(CURDIR)/$(GPU_SDK)/nvcc/nvidia/cu13/bin" && cd kernels/cuda && \
		{ printf '%s sm_75 %s\n' $(foreach ptx,$(notdir $(PTX_BASE:.ptx=)),$(ptx) $(ptx)); \
		  printf '%s\n' $(notdir $(PTX_NEWER:.ptx=)) | sed 's/\(.*\)\.\(sm_[0-9]*\)/& \2 \1/'; } | \
		xargs -P "$$(nproc)" -L 1 sh -c '$(NVCC) -arch=$$1 -o $(CURDIR)/bin/nvcc/$$0.ptx $$2.cu'

# Vet everything, build it into bin/, and link and start every test, with GPU support.
gpu: gpu-sdk
	. ./$(GPU_SDK)/env && $(GO) vet -tags gpu ./...
	@mkdir -p bin
	. ./$(GPU_SDK)/env && $(GO) build -tags gpu -o bin/ ./...
	. ./$(GPU_SDK)/env && $(GO) test -tags gpu -run '^$$' ./...

GPU_TESTED := kernels/cuda backend/cuda backend/gpu backend/lowlatency backend/hierarchy backend/compress/sparse backend/compress/half ops autograd bench cmd/euryale

# Build what .ci/gpu runs on a machine with GPUs and without Go: the command, an example,
# and tests as programs. They are stripped, since they travel.
gpu-binaries: gpu-sdk
	@mkdir -p bin/test
	. ./$(GPU_SDK)/env && $(GO) build -tags gpu -ldflags='-s -w' -o bin/ ./cmd/euryale ./examples/digits
	. ./$(GPU_SDK)/env && for dir in $(GPU_TESTED); do \
		$(GO) test -c -tags gpu -ldflags='-s -w' -o bin/test/$$(echo $$dir | tr / -).test ./$$dir || exit 1; \
	done

# Run the tests with GPU support, where REQUIRE_GPU=1 makes a missing GPU a failure.
gpu-test: gpu-sdk
	. ./$(GPU_SDK)/env && $(GO) test -tags gpu ./...

EMULATOR_FLAGS := -std=c++17 -O2 -ffp-contract=off -fwrapv -fno-strict-aliasing -Wall -Wno-unknown-pragmas -U_FORTIFY_SOURCE \
	-shared -fPIC -fvisibility-inlines-hidden
EMULATED_DEVICES ?= 2
# Kernels that take long here, and that the tests of package kernels/cuda run from the same sources.
TESTED_ALREADY := GPUComputes.*/(gather|reduce|binary|select|combine)|SameFunctions
EMULATED := LD_LIBRARY_PATH=$(CURDIR)/bin/emulated EMULATED_DEVICES=$(EMULATED_DEVICES) REQUIRE_GPU=1 \
	$(GO) test -count 1 -tags gpu

# Run the GPU tests on a driver and an NCCL whose devices are the host. NCCL's ranks are
# goroutines there, so tests with processes are left out, and so is what takes kernels that
# wait too long: minutes of calls back to back.
gpu-emulated: gpu-sdk
	@mkdir -p bin/emulated/old
	$(CLANG_HOST) $(EMULATOR_FLAGS) -o bin/emulated/libcuda.so.1 kernels/cuda/emulator/libcuda.cpp
	$(CLANG_HOST) $(EMULATOR_FLAGS) -o bin/emulated/libnccl.so.2 backend/gpu/emulator/libnccl.cpp -ldl
	$(CLANG_HOST) $(EMULATOR_FLAGS) -DOLD -o bin/emulated/old/libnccl.so.2 backend/gpu/emulator/libnccl.cpp -ldl
	. ./$(GPU_SDK)/env && $(EMULATED) -run GPU -skip '$(TESTED_ALREADY)' ./kernels/cuda ./cmd/euryale
	. ./$(GPU_SDK)/env && $(EMULATED) -run 'GPU|DeviceGoesOn|Cycles' ./backend/gpu
	. ./$(GPU_SDK)/env && EURYALE_NCCL=$(CURDIR)/bin/emulated/old $(EMULATED) -run 'OldLibrary|DeviceGoesOn' ./backend/gpu
	. ./$(GPU_SDK)/env && $(EMULATED) -run 'KernelsEnd|LeaveNo|Queued|Aborted|GivenBack|Noticed' ./backend/lowlatency
	. ./$(GPU_SDK)/env && $(EMULATED) -short -run 'SameBits|Graphs|ShareAGPU/3|CubeMeshOf' ./backend/lowlatency
	. ./$(GPU_SDK)/env && $(EMULATED) -run 'GPU|/.*gpu' -skip 'OfMachines|OfAnotherMachine' ./backend/hierarchy ./backend/compress/sparse ./backend/compress/half
	. ./$(GPU_SDK)/env && EURYALE_TEST_DEVICE=cuda $(EMULATED) ./backend/cuda
	. ./$(GPU_SDK)/env && EMULATED_CAPABILITY=70 $(EMULATED) -short -run 'GPUVariants|SameBitsOnGPU|CubeMeshOf' ./kernels/cuda ./backend/lowlatency
	. ./$(GPU_SDK)/env && $(EMULATED) -run '/.*gpu' -skip 'Processes|Killed' ./ops ./autograd
