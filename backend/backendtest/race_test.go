//go:build race

package backendtest // make race runs all of its tests
