package hierarchy

// inFlight is how many calls keep links inside and between machines busy, though each
// call has phases on one of them alone: for 64 buckets of 25 MiB, among two machines of
// two over sockets, four calls at a time take 0.78 of the time of one at a time (part 4 of
// bench/results/2026-11-21-h200x2-hierarchy-machines.txt).
const inFlight = 4

// InFlight is that of Capabilities.
func (c *Communicator) InFlight() int {
	if !c.layered() {
		return 1
	}
	return inFlight
}
