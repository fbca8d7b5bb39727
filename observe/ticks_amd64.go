package observe

// hasCounter says that there is count, and counterName is what Linux calls that counter as a clock.
const (
	hasCounter  = true
	counterName = "tsc"
)

// count reads the time stamp counter.
func count() int64
