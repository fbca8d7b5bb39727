# How the assembly of package internal/kernels/simd is written: by generators in a module of their
# own.

SIMD := internal/kernels/simd
SIMD_FAMILIES := $(patsubst $(SIMD)/gen/%/main.go,%,$(wildcard $(SIMD)/gen/*/main.go))

.PHONY: simd

SIMD_SUM := LC_ALL=C sh -c 'cat $(SIMD)/*.mk $(SIMD)/asm_* $(SIMD)/gen/go.* $(SIMD)/gen/*/*.go' | \
	sha256sum | cut -d ' ' -f 1

# Vet the generators of the assembly in internal/kernels/simd, and write it by them, unless neither
# has changed since its checked.sum was committed: what they import takes 25 s to compile.
simd:
	@if [ "$$($(SIMD_SUM))" = "$$(cat $(SIMD)/checked.sum 2>/dev/null)" ]; then \
		echo "$(SIMD) is as it was checked"; \
	else set -ex; \
		$(GO) -C $(SIMD)/gen mod tidy -diff; \
		$(GO) -C $(SIMD)/gen vet ./...; \
		for family in $(SIMD_FAMILIES); do \
			asm=../asm_$${family}_amd64; \
			$(GO) -C $(SIMD)/gen run ./$$family -pkg simd -out $$asm.s -stubs $$asm.go; \
		done; \
		$(GO) -C $(SIMD)/gen run ./dispatch; \
		$(SIMD_SUM) >$(SIMD)/checked.sum; \
	fi

# Assembly is as much a kernel as PTX: make kernels leaves both as their sources have them.
kernels: simd
