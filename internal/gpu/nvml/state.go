package nvml

import "time"

// State is the current state of a device. Values that it cannot report are 0.
type State struct {
	MemoryUsed, MemoryTotal int64         // bytes
	Clock, MaxClock         int64         // of its multiprocessors, in Hz
	Throttled               time.Duration // so far, by its power and temperature limits
}
