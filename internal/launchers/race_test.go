//go:build race

package launchers // make race runs all of its tests
