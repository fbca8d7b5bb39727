package group

import (
	"runtime"

	"golang.org/x/sys/unix"
)

// Place is where a rank runs. Ranks of one machine tell each other, so that they know whether
// all can poll at once.
type Place struct {
	Process string // the same for ranks of one process
	Cores   []int
}

// Here returns the place of this process.
func Here() Place {
	p := Place{Process: Process()}
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err == nil {
		for cpu := range len(set) * 64 {
			if set.IsSet(cpu) {
				p.Cores = append(p.Cores, cpu)
			}
		}
	}
	return p
}

// Census counts the ranks in the process of rank r, and the cores that the ranks of all places
// may use between them.
func Census(places []Place, r int) (inProcess, cores int) {
	all := map[int]bool{}
	for _, p := range places {
		if p.Process == places[r].Process {
			inProcess++
		}
		for _, cpu := range p.Cores {
			all[cpu] = true
		}
	}
	if len(all) == 0 {
		return inProcess, runtime.NumCPU()
	}
	return inProcess, len(all)
}
