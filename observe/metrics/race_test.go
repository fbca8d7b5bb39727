//go:build race

package metrics // make race runs all of its tests
