package nvml

import "time"

// State is what a device does at the moment. What it cannot tell is 0.
type State struct {
	MemoryUsed, MemoryTotal int64         // bytes
	Clock, MaxClock         int64         // of its multiprocessors, in Hz
	Throttled               time.Duration // so far, by its limits of power and temperature
}
