//go:build race

package session // make race runs all of its tests
