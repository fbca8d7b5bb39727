//go:build race

package exit // make race runs all of its tests
