//go:build race

package hierarchy // make race runs all of its tests
