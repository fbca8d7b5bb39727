//go:build race

package checkpoint // make race runs all of its tests
