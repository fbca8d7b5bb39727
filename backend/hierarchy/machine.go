package hierarchy

import (
	"fmt"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Identity is what a rank tells of itself, so that every rank can derive the
// [Layout]. Ranks are on one machine if Boot, Host and Memory agree:
//
//   - Boot alone is the same for machines that were resumed from one snapshot,
//     and for all containers of a machine;
//   - Host alone is the same wherever images are cloned, or where containers
//     take the name of their machine;
//   - Memory tells apart containers of one machine that cannot share memory,
//     and so cannot be one machine to the backends.
type Identity struct {
	Boot   string // of this boot of the machine's kernel
	Host   string // its name, or what NCCL takes for it (NCCL_HOSTID)
	Memory string // of the file system that shared memory is on
	// Bus is the address of the rank's GPU on the PCI bus, "" on the host. Places
	// follow it, so that rails connect GPUs with the same position.
	Bus string
}

// sharedMemory is where backends make memory that ranks share.
const sharedMemory = "/dev/shm"

// Here returns the identity of this process, for a rank that uses the GPU at bus.
// What cannot be found out is left empty, and so does not tell machines apart.
func Here(bus string) Identity {
	id := Identity{Bus: bus}
	if id.Host = os.Getenv("NCCL_HOSTID"); id.Host == "" {
		id.Host, _ = os.Hostname()
	}
	boot, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	id.Boot = strings.TrimSpace(string(boot))
	var s unix.Stat_t
	if err := unix.Stat(sharedMemory, &s); err == nil {
		id.Memory = fmt.Sprint(s.Dev) // every mount has a number of its own
	}
	return id
}

// Discover returns the layout of ranks that told these identities: machines in
// the order of their first ranks, places by bus and then by rank. Machines may
// turn out to have different numbers of ranks.
func Discover(ids []Identity) Layout {
	names := make([]string, len(ids))
	for r, id := range ids {
		names[r] = strings.Join([]string{id.Boot, id.Host, id.Memory}, "\n")
	}
	l := grouped(names)
	for _, ranks := range l.machines {
		slices.SortStableFunc(ranks, func(a, b int) int { return strings.Compare(ids[a].Bus, ids[b].Bus) })
	}
	return layoutOf(l.machines)
}
