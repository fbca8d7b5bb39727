//go:build race

package euryale_test // make race runs all of its tests
