package straggler

import (
	"fmt"
	"strings"
	"time"
)

// Cause is why a rank is late. Where two explain as much, the first one counts: a loader may be
// late since its threads had no core.
type Cause uint8

// The causes. Processes note the time of those before Computation.
const (
	Stopped           Cause = iota // by a signal
	CgroupThrottling               // its cgroup had used up its time
	ClockThrottling                // of the processor, or of the GPU
	CPUContention                  // its threads waited for a core
	GarbageCollection              // of the Go runtime
	PageFaults
	Loader        // it waited for samples
	HostOperation // of a graph, by its Do
	Device        // it took longer to compute
	Computation   // none of those, and it used the processor
	Waiting       // none of those, and it did not
	Causes        // how many a rank can have

	Exchange = Causes // of a bucket, between all ranks
)

// Noted is how many causes have a time of their own.
const Noted = int(Computation)

var names = [Causes + 1]string{"stopped", "cgroup_throttling", "clock_throttling", "cpu_contention",
	"garbage_collection", "page_faults", "loader", "host_operation", "device", "computation",
	"waiting", "exchange"}

// String returns the name of the cause in metrics: "garbage_collection".
func (c Cause) String() string { return names[c] }

// advice says what a cause is, and what to do.
var advice = [Causes + 1]string{
	Stopped: "a signal or a debugger stopped it",
	CgroupThrottling: "its cgroup limits its processor time; raise cpu.max (limits.cpu of " +
		"Kubernetes), or give it fewer threads by GOMAXPROCS",
	ClockThrottling: "the clock was throttled: check its cooling and its limit of power",
	CPUContention: "its threads waited for a core; run fewer programs or ranks there, or give " +
		"ranks cores of their own (taskset)",
	GarbageCollection: "garbage collection of %s; set GOMEMLIMIT",
	PageFaults:        "page faults; keep memory and use it again, and look whether it swaps",
	Loader:            "it waited for samples; raise fit.Prefetch, or make Set.Read faster",
	HostOperation: "operations of its graph that run by their Do; docs/ops.md lists those that " +
		"a plan runs itself",
	Device: "its GPU computed for longer; compare its samples, its clock (nvidia-smi -q -d " +
		"CLOCK,PERFORMANCE) and what else runs there",
	Computation: "it computed for longer; compare its samples and its cores with other ranks'",
	Waiting: "it waited outside of collectives without computing; look for files, locks and " +
		"the network in its stacks (Ctrl-\\)",
	Exchange: "compare its links (nvidia-smi nvlink -s, ibstat, ethtool) and what else uses them",
}

// Verdict is why a rank was late, or why all are slower than they were.
type Verdict struct {
	Rank  int           // -1 for all
	Late  time.Duration // behind the rank in the middle, or their own past, a step; 0 for neither
	Share float64       // what it has caused of the time blocked in collectives, or of a step
	Cause Cause
	Heap  int64 // bytes that it has in use, for GarbageCollection
	// More is by how much its GPU, or the exchange of a bucket, takes longer than it did.
	More   time.Duration
	Layer  string // of which that is most, "" if not of one alone
	Bucket int    // from 1, 0 for none
}

// String returns the verdict in a line.
func (v Verdict) String() string {
	why := advice[v.Cause]
	if v.Cause == GarbageCollection {
		why = fmt.Sprintf(why, bytesText(v.Heap))
	}
	longer := fmt.Sprintf("takes %s ms longer than it did", millis(v.More))
	if v.Layer != "" {
		longer += ", mostly in " + v.Layer
	}
	switch {
	case v.Bucket > 0: // as errors number them
		return fmt.Sprintf("all ranks: bucket %d %s, %.0f %% of a step: %s", v.Bucket-1, longer,
			100*v.Share, why)
	case v.Late == 0:
		_, todo, _ := strings.Cut(why, "; ")
		return fmt.Sprintf("rank %d: its GPU %s, %.0f %% of a step: %s", v.Rank, longer,
			100*v.Share, todo)
	case v.More > 0:
		why += "; its GPU " + longer
	}
	if v.Rank == AllRanks {
		return fmt.Sprintf("all ranks: a step takes %s ms more than it did, %.0f %% of it: %s",
			millis(v.Late), 100*v.Share, why)
	}
	return fmt.Sprintf("rank %d was late by %s ms a step, %.0f %% of exposed time: %s", v.Rank,
		millis(v.Late), 100*v.Share, why)
}

func millis(d time.Duration) string { return fmt.Sprintf("%.3g", d.Seconds()*1e3) }

func bytesText(n int64) string {
	if n < 10<<20 {
		return fmt.Sprintf("%d KB", n/1e3)
	}
	return fmt.Sprintf("%d MB", n/1e6)
}
