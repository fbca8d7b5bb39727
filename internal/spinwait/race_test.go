//go:build race

package spinwait // make race runs all of its tests
