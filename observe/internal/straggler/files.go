package straggler

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// files are those in which Linux tells of a process and its machine. Other systems have none.
type files struct {
	root         string
	cgroups      []string             // cpu.stat of the process's cgroup and of those around it
	clocks       []string             // how long a core's clock was throttled, in milliseconds
	values       map[string]int64     // what they have
	before       map[string]int64     // what they had last
	throttledGPU func() time.Duration // how long a GPU's clock was
	noted        [Noted]time.Duration // what has changed, until somebody takes it
	next         time.Time            // when they may be read again, of a straggler
	rest         time.Time            // the same, of any rank
}

// How often files are read, and how much of the time that may take.
const (
	restTime = 100 * time.Millisecond
	lateCost = 100
	restCost = 500
)

// openFiles finds the files below root, "/" but for tests.
func openFiles(root string) files {
	f := files{root: root, values: map[string]int64{}}
	f.clocks, _ = filepath.Glob(root +
		"/sys/devices/system/cpu/cpu*/thermal_throttle/core_throttle_total_time_ms")
	of, _ := os.ReadFile(root + "/proc/self/cgroup")
	for line := range strings.Lines(string(of)) {
		fields := strings.SplitN(strings.TrimSpace(line), ":", 3) // 4:cpu,cpuacct:/path
		if len(fields) < 3 || fields[1] != "" && !slices.Contains(strings.Split(fields[1], ","),
			"cpu") {
			continue
		}
		// a container sees its own cgroup at the top
		for at := filepath.Clean("/" + fields[2]); ; at = filepath.Dir(at) {
			name := root + "/sys/fs/cgroup/" + fields[1] + at + "/cpu.stat"
			if _, err := os.Stat(name); err == nil {
				f.cgroups = append(f.cgroups, name)
			}
			if at == "/" {
				break
			}
		}
	}
	return f
}

// due reports whether it is time to look.
func (f *files) due(late bool) bool {
	now := time.Now()
	return !now.Before(f.rest) || late && !now.Before(f.next)
}

// look reads the files, and notes what has changed.
func (f *files) look() {
	began, first := time.Now(), f.next.IsZero()
	f.before, f.values = f.values, map[string]int64{} // threads come and go
	contention, throttled, clock := f.waited(), time.Duration(0), time.Duration(0)
	for _, name := range f.cgroups {
		throttled += f.throttled(name)
	}
	for _, name := range f.clocks {
		clock = max(clock, time.Duration(f.change(name, number(read(name))))*time.Millisecond)
	}
	clock = max(clock, time.Duration(f.change("gpu", int64(f.throttledGPU()))))
	if !first {
		f.noted[CPUContention] += max(contention-throttled, 0) // threads wait in either case
		f.noted[CgroupThrottling] += throttled
		f.noted[ClockThrottling] += clock
	}
	now := time.Now()
	took := now.Sub(began) // more than it costs where there is no core
	f.next = now.Add(min(lateCost*took, restTime))
	f.rest = now.Add(min(max(restCost*took, restTime), 10*restTime))
}

// waited returns how long the thread that waited longest for a core did so, and other guests of
// the machine's hypervisor had one. Which thread the program needs, nobody knows.
func (f *files) waited() (longest time.Duration) {
	threads, _ := os.ReadDir(f.root + "/proc/self/task")
	for _, t := range threads {
		name := f.root + "/proc/self/task/" + t.Name() + "/schedstat" // run, waited, times
		if fields := bytes.Fields(read(name)); len(fields) > 1 {
			longest = max(longest, time.Duration(f.change(name, number(fields[1]))))
		}
	}
	const hertz, steal = 100, 8 // of all processors; ours are as likely as others
	name, stat := f.root+"/proc/stat", read(f.root+"/proc/stat")
	line, rest, _ := bytes.Cut(stat, []byte("\n"))
	if fields := bytes.Fields(line); len(fields) > steal {
		cpus := max(bytes.Count(rest, []byte("\ncpu"))+1, 1)
		longest += time.Duration(f.change(name, number(fields[steal]))) * time.Second /
			hertz / time.Duration(cpus)
	}
	return longest
}

// throttled returns for how long a cgroup was.
func (f *files) throttled(name string) time.Duration {
	units := map[string]time.Duration{"throttled_usec": time.Microsecond, // version 2
		"throttled_time": time.Nanosecond}
	for line := range bytes.Lines(read(name)) {
		if fields := bytes.Fields(line); len(fields) > 1 && units[string(fields[0])] > 0 {
			return time.Duration(f.change(name, number(fields[1]))) * units[string(fields[0])]
		}
	}
	return 0
}

// change returns by how much a number has grown, 0 for a new one.
func (f *files) change(name string, now int64) int64 {
	before, known := f.before[name]
	f.values[name] = now
	if !known {
		return 0
	}
	return max(now-before, 0)
}

func read(name string) []byte {
	text, _ := os.ReadFile(name) // a thread may have ended
	return text
}

func number(text []byte) int64 {
	n, _ := strconv.ParseInt(string(bytes.TrimSpace(text)), 10, 64)
	return n
}
