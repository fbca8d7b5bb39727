//go:build race

package launch // make race runs all of its tests
