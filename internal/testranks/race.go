//go:build race

package testranks

// Race says that the race detector slows everything down.
const Race = true
