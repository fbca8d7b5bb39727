package launch

import (
	"fmt"
	"io/fs"
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
	for line := range strings.Lines(string(cgroups)) {
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
		switch {
		case len(parts) != 3:
		case parts[1] == "": // version 2
			add("sys/fs/cgroup", parts[2], "memory.events")
		case slices.Contains(strings.Split(parts[1], ","), "memory"):
			add("sys/fs/cgroup/memory", parts[2], "memory.oom_control")
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
