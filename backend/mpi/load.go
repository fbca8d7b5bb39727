//go:build !mpi

package mpi

import "errors"

func load(func(string) string) (library, error) {
	return nil, errors.New("this program was built without MPI: build it with -tags mpi (it " +
		"takes cgo and a C compiler, and no header of MPI)")
}
