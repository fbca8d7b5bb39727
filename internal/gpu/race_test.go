//go:build race

package gpu // make race runs all of its tests
