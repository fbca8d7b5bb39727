//go:build race

package observe // make race runs all of its tests
