# How the kernels are compiled. checked.sum is a hash of this file, too.

CUDA := internal/kernels/cuda
PTX_BASE := $(patsubst %.cu,%.ptx.gz,$(wildcard $(CUDA)/*.cu))
PTX_NEWER := $(patsubst %,$(CUDA)/%.ptx.gz,attention_bf16.sm_80 \
	attention_few.sm_80 attention_narrow.sm_80 fewrows.sm_80 gather.sm_80 gemm.sm_80 ll128.sm_80 \
	recurrent.sm_80 allreduce.sm_90 attention_bf16.sm_90a fewrows.sm_90)
# Functions that kernels/fuse copies into the kernels that it writes.
PTX_FUNCTIONS := kernels/fuse/functions.ptx
PTX := $(PTX_BASE) $(PTX_NEWER) $(PTX_FUNCTIONS)

# One GPU architecture: what later ones run too; and newer ones where their instructions
# pay. Fused multiply-adds are written where they are meant, so that results equal the host's.
$(CUDA)/%.ptx.gz $(PTX_FUNCTIONS): ARCHITECTURE := sm_70
$(CUDA)/%.sm_80.ptx.gz: ARCHITECTURE := sm_80
$(CUDA)/%.sm_90.ptx.gz: ARCHITECTURE := sm_90
$(CUDA)/%.sm_90a.ptx.gz: ARCHITECTURE := sm_90a
CLANG_CUDA_FLAGS = -x cuda --cuda-device-only --cuda-gpu-arch=$(ARCHITECTURE) -nocudainc \
	-nocudalib -std=c++17 -O3 -ffp-contract=off -Wall -Wextra -Werror

.PHONY: kernels ptx ptx-check machine-code nvcc always

KERNELS_SUM := { LC_ALL=C sh -c 'cat $(CUDA)/*.mk $(CUDA)/*.cu $(CUDA)/*.cuh \
	$(CUDA)/*.ptx.gz $(CUDA)/*.cubin.bz2 $(CUDA)/ptx.go $(CUDA)/pdl.go \
	kernels/fuse/*.cu kernels/fuse/*.ptx'; $(CLANG_CUDA) -dumpversion; } | \
	sha256sum | cut -d ' ' -f 1

# Compile and check the kernels by ptx, ptx-check, machine-code and nvcc, unless neither they nor
# the compiler have changed since checked.sum was committed. They are called as make, not as
# $(MAKE), since a dry run would then write the sum unchecked.
kernels:
	@if [ "$$($(KERNELS_SUM))" = "$$(cat $(CUDA)/checked.sum 2>/dev/null)" ]; then \
		echo "$(CUDA) is as it was checked"; \
	else \
		make ptx && make ptx-check && make machine-code && make nvcc && \
			$(KERNELS_SUM) >$(CUDA)/checked.sum; \
	fi

# Compile all kernels to the PTX that is committed, and embedded, by gzip. All, because a checkout
# keeps no times.
ptx: $(PTX)

define compile-ptx
	@tmp=$$(mktemp) && trap 'rm -f $$tmp' EXIT && \
	$(CLANG_CUDA) $(CLANG_CUDA_FLAGS) -S -o $$tmp $< && \
	{ echo "// Code generated from $(<F) by clang $$($(CLANG_CUDA) -dumpversion); DO NOT EDIT."; \
	  sed -e 's,[[:space:]]*//.*,,' -e '/^[[:space:]]*$$/d' $$tmp; } | \
	$(if $(filter %.gz,$@),gzip -9n,cat) > $@
	@echo "$@"
endef

$(CUDA)/%.ptx.gz: $(CUDA)/%.cu always
	$(compile-ptx)

kernels/fuse/%.ptx: kernels/fuse/%.cu always
	$(compile-ptx)

$(CUDA)/%.sm_80.ptx.gz: $(CUDA)/%.cu always
	$(compile-ptx)

$(CUDA)/%.sm_90.ptx.gz: $(CUDA)/%.cu always
	$(compile-ptx)

$(CUDA)/%.sm_90a.ptx.gz: $(CUDA)/%.cu always
	$(compile-ptx)

# CUDA 12 has the last ptxas for compute capability 7.0.
PTXAS_WHEEL := nvidia-cuda-nvcc-cu12==12.8.93
PTXAS := $(GPU_SDK)/ptxas/nvidia/cuda_nvcc/bin/ptxas

$(PTXAS):
	@$(PIP_INSTALL) --target $(GPU_SDK)/ptxas $(PTXAS_WHEEL)

# Assemble the committed PTX for the oldest devices that it is for: ptxas refuses instructions that
# they lack. Those for newer devices become machine code.
ptx-check: $(PTXAS)
	@printf -- '-arch=sm_%s %s\n' $(foreach ptx,$(PTX_BASE),70 $(ptx) 75 $(ptx)) | \
		xargs -P "$$(nproc)" -L 1 sh -c 'gzip -dc $$1 | $(PTXAS) $$0 -o /dev/null -'

# Compile the kernels for the commonest devices to the machine code that is committed, and embedded,
# by bzip2, so that their driver compiles nothing. Drivers for CUDA 12 and newer take it; others
# compile the PTX. The texts are those that a driver would be given.
machine-code: $(PTXAS)
	@tmp=$$(mktemp -d) && trap 'rm -r $$tmp' EXIT && $(GO) run ./$(CUDA)/gen $$tmp && \
	ls $$tmp | sed 's/\(.*\)\.\(sm_[0-9a]*\)\.ptx/\1 \2/' | \
		xargs -P "$$(nproc)" -L 1 sh -c 'cd '$$tmp' && $(CURDIR)/$(PTXAS) \
			-arch=$$1 -o $$0.$$1.cubin $$0.$$1.ptx && bzip2 -9 $$0.$$1.cubin' && \
	rm -f $(CUDA)/*.cubin.bz2 && mv $$tmp/*.cubin.bz2 $(CUDA)/

NVCC_WHEELS := nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 \
	nvidia-cuda-runtime==13.0.96
NVCC := nvcc -ptx -std=c++17 -O3 -fmad=false -Werror all-warnings

# Compile the kernels with nvcc, of a toolkit or of NVIDIA's wheels, into bin/nvcc, for
# .ci/gpu to compare on a GPU. CUDA 13 compiles for compute capability 7.5 and newer.
nvcc:
	@mkdir -p $(GPU_SDK)/nvcc bin/nvcc
	@command -v nvcc >/dev/null || [ -d $(GPU_SDK)/nvcc/nvidia ] || \
		$(PIP_INSTALL) --target $(GPU_SDK)/nvcc $(NVCC_WHEELS)
	@export PATH="$$PATH:$(CURDIR)/$(GPU_SDK)/nvcc/nvidia/cu13/bin" && cd $(CUDA) && \
		{ printf '%s sm_75 %s\n' $(foreach ptx,$(notdir $(PTX_BASE:.ptx.gz=)),$(ptx) $(ptx)); \
		  printf '%s\n' $(notdir $(PTX_NEWER:.ptx.gz=)) | \
			sed 's/\(.*\)\.\(sm_[0-9a]*\)/& \2 \1/'; } | \
		xargs -P "$$(nproc)" -L 1 sh -c '$(NVCC) -arch=$$1 -o $(CURDIR)/bin/nvcc/$$0.ptx $$2.cu'
