//go:build race

package shm // make race runs all of its tests
