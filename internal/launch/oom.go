package launch

import (
	"fmt"
	"io/fs"
	"iter"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
)

// oom tells which kills are the kernel's, for lack of memory: it counts them for each cgroup.
type oom struct {
	root fs.FS

	mu   sync.Mutex
	seen int // kills before the attempt, and those that were told since
}

// newOOM begins to count.
func newOOM(root fs.FS) *oom {
	seen, _ := oomKills(root)
	return &oom{root: root, seen: seen}
}

// explain says that lack of memory is why a process was killed; "" if the kernel has not killed any
// for that. A kill explains one end.
func (o *oom) explain(e ending) string {
	if e.Asked || !e.Status.Signaled() || e.Status.Signal() != syscall.SIGKILL {
		return ""
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	kills, file := oomKills(o.root)
	if kills <= o.seen {
		return ""
	}
	o.seen++
	return fmt.Sprintf("out of memory: the kernel has killed a process for that (oom_kill in "+
		"/%s); give the job more memory, or let it need less", file)
}

// oomKills returns how many processes the kernel has killed for lack of memory in the cgroup of
// this process or, where that does not count them, as the root does not, on the machine; and the
// file that says so.
func oomKills(root fs.FS) (kills int, file string) {
	cgroups, _ := fs.ReadFile(root, "proc/self/cgroup") // without one there is the machine
	var files []string
	add := func(mount, dir, name string) { // a container may see its own directory as the root
		files = append(files, path.Join(mount, dir, name), path.Join(mount, name))
	}
	for controllers, dir := range cgroupsIn(string(cgroups)) {
		switch {
		case controllers == "": // version 2
			add("sys/fs/cgroup", dir, "memory.events")
		case slices.Contains(strings.Split(controllers, ","), "memory"):
			add("sys/fs/cgroup/memory", dir, "memory.oom_control")
		}
	}
	for _, file := range append(files, "proc/vmstat") {
		text, _ := fs.ReadFile(root, file) // "" counts nothing
		for line := range strings.Lines(string(text)) {
			if n, ok := strings.CutPrefix(line, "oom_kill "); ok {
				kills, err := strconv.Atoi(strings.TrimSpace(n))
				if err == nil {
					return kills, file
				}
			}
		}
	}
	return 0, ""
}

// cgroupsIn yields the controllers and the directory of each line of /proc/PID/cgroup; version 2
// names no controllers.
func cgroupsIn(text string) iter.Seq2[string, string] {
	return func(yield func(controllers, dir string) bool) {
		for line := range strings.Lines(text) {
			parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
			if len(parts) == 3 && !yield(parts[1], parts[2]) {
				return
			}
		}
	}
}
