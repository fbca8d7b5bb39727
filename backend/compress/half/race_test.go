//go:build race

package half // make race runs all of its tests
