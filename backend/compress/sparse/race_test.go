//go:build race

package sparse // make race runs all of its tests
