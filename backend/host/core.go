package host

// stepAside moves this rank's thread to another core if its core has too many of the group's ranks.
// While one of these waits awake, those behind it cannot run. So all of them begin to sleep, and
// then only one of them is ever ready to run: to the system, their core is not overloaded. In a
// virtual machine, the system also does not wake a sleeper on an idle core if the hypervisor has
// taken that core back.
func (c *comm) stepAside() {
	if c.spin.perCore == 0 {
		return
	}
	here, ranks := core(), 1
	for r := range c.size {
		if r != c.rank && c.region.rankPage(r).core.Load() == uint32(here)+1 {
			ranks++
		}
	}
	if ranks <= c.spin.perCore {
		return
	}
	leaveCore(here)
}
