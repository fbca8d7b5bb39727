//go:build race

package host // make race runs all of its tests
