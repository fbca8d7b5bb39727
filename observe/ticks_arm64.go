package observe

// hasCounter says that there is count, and counterName is what Linux calls that counter as a clock.
const (
	hasCounter  = true
	counterName = "arch_sys_counter"
)

// count reads the system counter.
func count() int64
