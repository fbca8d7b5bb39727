//go:build race

package backend_test // make race runs all of its tests
