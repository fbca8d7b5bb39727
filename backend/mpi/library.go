package mpi

import (
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/env"
)

// handle is one of MPI's.
type handle uintptr

// library is MPI as it was opened.
type library interface {
	// describe returns the version and the file.
	describe() string
	// initialize begins MPI, and finalize ends it, on the same thread.
	initialize() (rank, size int, err error)
	finalize() error
	// world is the communicator of all ranks.
	world() handle
	// split makes a communicator of the ranks that pass one color, ordered by key; none with a
	// negative color. It waits for all ranks of the parent.
	split(parent handle, color, key int) (handle, error)
	free(comm handle) error
	// start starts a call and tests it some times; test tests it again.
	start(r *request, polls int) error
	test(r *request, polls int) error
}

// request is a call under way, as struct euryale_call of libmpi.h has it.
type request struct {
	kind, dtype, op, root              int32
	count, begun, over                 int32
	inPlace, crowded                   int32
	sends, sendAt, receives, receiveAt uintptr // of int32
	dst, src                           uintptr
	comm                               handle
	numbers                            uintptr // of handles
}

// done reports whether a call that has been started is over.
func (r *request) done() bool { return r.over == r.begun }

const (
	// exchange is a kind besides those of package backend: messages of bytes between each two
	// ranks.
	exchange = int32(backend.Scatter) + 1
	// messages is how many requests an exchange has for each other rank at most.
	messages = 2 * 3
)

// places lists where a library may be, in the order in which to try: that of the launcher that has
// started this process first, if its variables are there.
func places(getenv func(string) string) []string {
	standard := []string{"libmpi_abi.so.1", "libmpi_abi.so.0", "libmpi_abi.so"}
	open := []string{"libmpi.so.40"}
	hydra := []string{"libmpi.so.12", "libmpich.so.12"}
	if named := env.MPI.Read(getenv, slices.Concat(standard, open, hydra)...); named != nil {
		return named
	}
	if getenv("OMPI_COMM_WORLD_SIZE") != "" {
		return slices.Concat(open, standard, hydra)
	}
	if getenv("PMI_RANK") != "" { // Slurm sets it, too, whatever library its ranks have
		return slices.Concat(standard, hydra, open)
	}
	return slices.Concat(standard, open, hydra)
}
