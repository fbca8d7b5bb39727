//go:build race

package testranks // make race runs all of its tests
