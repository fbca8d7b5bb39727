//go:build !race

package proctest

// Race says that the race detector slows everything down.
const Race = false
