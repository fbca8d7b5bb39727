//go:build race

package workers // make race runs all of its tests
