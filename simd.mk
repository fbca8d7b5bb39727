# How the assembly of package kernels/internal/simd is written: by generators in a module of their
# own.

SIMD := kernels/internal/simd
SIMD_FAMILIES := $(patsubst $(SIMD)/gen/%/main.go,%,$(wildcard $(SIMD)/gen/*/main.go))

.PHONY: simd simd-lint

# Write the assembly of kernels/internal/simd from its generators, and commit it.
simd:
	@set -e; for family in $(SIMD_FAMILIES); do \
		asm=../asm_$${family}_amd64; \
		$(GO) -C $(SIMD)/gen run ./$$family -pkg simd -out $$asm.s -stubs $$asm.go; \
	done

# Assembly is as much a kernel as PTX: make kernels leaves both as their sources have them.
kernels: simd

# Vet the generators, as a part of make lint.
simd-lint:
	$(GO) -C $(SIMD)/gen mod tidy -diff
	$(GO) -C $(SIMD)/gen vet ./...
