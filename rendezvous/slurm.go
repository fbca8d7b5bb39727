package rendezvous

import (
	"fmt"
	"strconv"
	"strings"
)

// slurmScript reports whether this is the batch script of a Slurm job, which has the
// variables of a rank but is not one.
func (r *envReader) slurmScript() bool {
	return r.first("ENVIRONMENT") == "BATCH" && !r.has("SLURM_STEP_ID")
}

// slurm reads the variables of srun.
func (r *envReader) slurm() Env {
	e := Env{
		Launcher: "srun",
		Rank:     r.count("SLURM_PROCID"), Size: r.count("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
		LocalRank: r.count("SLURM_LOCALID"),
		Job:       fmt.Sprintf("slurm-%s.%s", r.first("SLURM_JOB_ID"), r.first("SLURM_STEP_ID")),
		// Rank 0 runs on the first machine of the step. srun is often called on another machine.
		Addr: firstHost(r.first("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")),
	}
	if e.Addr == "" {
		e.Addr = r.first("SLURM_LAUNCH_NODE_IPADDR")
	}
	// This port is the same on all ranks and differs between steps.
	e.Port = portOf(r.countOr(0, "SLURM_JOB_ID")*16 + r.countOr(0, "SLURM_STEP_ID"))
	e.LocalSize = r.slurmLocalSize(e)
	return e
}

// slurmLocalSize returns the number of ranks on this rank's machine.
func (r *envReader) slurmLocalSize(e Env) int {
	counts := r.first("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
	switch {
	case counts != "":
		n, err := tasksOn(counts, r.countOr(0, "SLURM_NODEID"))
		if err != nil {
			r.fail("SLURM_TASKS_PER_NODE=%q: %w", counts, err)
		}
		return n
	case r.has("SLURM_NTASKS_PER_NODE"):
		return min(r.count("SLURM_NTASKS_PER_NODE"), e.Size)
	case r.countOr(1, "SLURM_NNODES") == 1:
		return e.Size
	}
	r.fail("SLURM_TASKS_PER_NODE is not set: start the program with srun")
	return 0
}

// tasksOn returns entry node of a list such as "2(x3),1", which is 2,2,2,1.
func tasksOn(counts string, node int) (int, error) {
	for entry := range strings.SplitSeq(counts, ",") {
		number, times, repeated := strings.Cut(entry, "(x")
		n, err := strconv.Atoi(number)
		repeat := 1
		if err == nil && repeated {
			repeat, err = strconv.Atoi(strings.TrimSuffix(times, ")"))
		}
		if err != nil || n < 0 || repeat < 1 {
			return 0, fmt.Errorf("entry %q is not a count like 2 or 2(x3)", entry)
		}
		if node < repeat {
			return n, nil
		}
		node -= repeat
	}
	return 0, fmt.Errorf("it has no entry for this machine")
}

// firstHost returns the first host of a list such as "gpu[03-05,9],login".
func firstHost(list string) string {
	var host strings.Builder
	for list != "" {
		i := strings.IndexAny(list, "[,")
		if i < 0 {
			i = len(list)
		}
		host.WriteString(list[:i])
		if i == len(list) || list[i] == ',' {
			break
		}
		first, rest, _ := strings.Cut(list[i+1:], "]")
		if end := strings.IndexAny(first, "-,"); end >= 0 {
			first = first[:end]
		}
		host.WriteString(first)
		list = rest
	}
	return host.String()
}
