//go:build race

package rendezvous // make race runs all of its tests
