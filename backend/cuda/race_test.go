//go:build race

package cuda // make race runs all of its tests
