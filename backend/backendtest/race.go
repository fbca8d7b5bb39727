//go:build race

package backendtest

// raceEnabled says that the race detector slows everything down.
const raceEnabled = true
