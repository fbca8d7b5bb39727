//go:build race

package serial // make race runs all of its tests
