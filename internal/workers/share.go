package workers

import "runtime"

// Share returns how many workers a rank should have where so many ranks share the machine: its
// cores divided by the ranks, at least 1. Cores are those that the process may use:
// runtime.GOMAXPROCS, which Go derives from the affinity of the process and the quota of its
// cgroup.
func Share(localRanks int) int { return max(runtime.GOMAXPROCS(0)/max(localRanks, 1), 1) }
