//go:build race

package fault // make race runs all of its tests
