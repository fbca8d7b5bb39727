//go:build race

package mpi_test // make race runs all of its tests
