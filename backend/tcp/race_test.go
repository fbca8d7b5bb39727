//go:build race

package tcp // make race runs all of its tests
