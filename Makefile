# Everything a developer runs. `make demo` and `make test` are the two to know.

GO ?= go
FUZZTIME ?= 20s
STATICCHECK_VERSION := v0.8.2

.PHONY: demo test test-full race fuzz bench size lint help

# Train the digits example on two ranks, as processes of this machine.
demo:
	$(GO) run ./cmd/euryale run -n 2 ./examples/digits

# Every test, on a sample of the cases: what to run before a commit.
test:
	$(GO) test ./...

# Every test on the full product of cases: what to run before a release.
test-full:
	EURYALE_FULL=1 $(GO) test -timeout 60m ./...

# Every test under the race detector, but for whole trainings and what other programs compute.
race:
	$(GO) test -race -short -timeout 30m ./...

# Each fuzz test for a while: the decoders that read what a network sends.
fuzz:
	@set -e; grep -rEo --include='*_test.go' '^func Fuzz\w+' . | sort | while IFS=': ' read -r file _ name; do \
		echo "$$file $$name"; \
		$(GO) test -run '^$$' -fuzz "^$$name\$$" -fuzztime $(FUZZTIME) $$(dirname $$file); \
	done

# Time all-reduces on two and four processes, and the kernels.
bench:
	$(GO) run ./cmd/euryale bench -n 2
	$(GO) run ./cmd/euryale bench -n 4
	$(GO) test -run '^$$' -bench . -benchmem ./kernels ./backend/host

# The size of the module by a fixed rule: lines, exported identifiers, tests that pass.
size:
	@$(GO) test -json ./... | $(GO) run ./internal/size

# Formatting, vet, staticcheck, and the build without cgo.
lint:
	@unformatted=$$(gofmt -l .); test -z "$$unformatted" || { echo "gofmt wants:"; echo "$$unformatted"; exit 1; }
	$(GO) vet ./...
	CGO_ENABLED=0 $(GO) build ./...
	$(GO) run honnef.co/go/tools/cmd/staticcheck@$(STATICCHECK_VERSION) ./...

# List the targets.
help:
	@awk '/^# / { if (!text) text = substr($$0, 3); next } /^[a-z-]+:/ && text { sub(":.*", ""); printf "%-13s %s\n", $$0, text } { text = "" }' $(MAKEFILE_LIST)

include gpu.mk
