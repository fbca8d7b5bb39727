//go:build race

package files // make race runs all of its tests
