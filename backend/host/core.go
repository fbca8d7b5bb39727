package host

// stepAside moves the thread of this rank to another core, if its core has more of the group's
// ranks than it should. While one of them waits awake, those behind it cannot come, so that all
// begin to sleep, and then only one of them is ever ready to run: to the system, their core has no
// more to do than it can. In a virtual machine it does not wake a sleeper on an idle core either,
// if the hypervisor has taken that back.
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
