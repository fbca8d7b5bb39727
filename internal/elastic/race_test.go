//go:build race

package elastic // make race runs all of its tests
