//go:build race

package fit_test // make race runs all of its tests
