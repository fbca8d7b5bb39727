package launchers

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"
)

// slurm is srun: https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES. A batch
// script has the variables of a rank, but not those of a step, and starts programs itself. The
// variables of an allocation, such as SLURM_NTASKS in the shell of salloc, are no signs.
func slurm() Contract {
	return Contract{Name: "srun", Rank: counts{"SLURM_PROCID"},
		Size:      counts{"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"},
		LocalRank: counts{"SLURM_LOCALID"},
		Signs: []string{"SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID",
			"SLURM_STEP_NUM_TASKS"},
		Job: []string{"SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"},
		More: func(v *Vars, p *Position) {
			inStep := v.Text("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS") != ""
			node := max(0, v.Count("SLURM_NODEID"))
			p.Script = v.Text("ENVIRONMENT") == "BATCH" && !inStep && p.Rank <= 0 && node == 0
			// Rank 0 is on the first machine of the step. srun is often called on another one.
			p.Addr = cmp.Or(firstHost(v.Text("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")),
				v.Text("SLURM_LAUNCH_NODE_IPADDR"))
			// Two steps of one job have different ports.
			p.Port = PortOf(max(0, v.Count("SLURM_JOB_ID"))*16 + max(0, v.Count("SLURM_STEP_ID")))
			counts := v.Text("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
			each, nodes := v.Count("SLURM_NTASKS_PER_NODE"), v.Count("SLURM_NNODES")
			var err error
			switch {
			case counts != "":
				if p.LocalSize, err = tasksOn(counts, node); err != nil {
					v.fail(fmt.Errorf("SLURM_STEP_TASKS_PER_NODE or SLURM_TASKS_PER_NODE is %q: %w",
						counts, err))
				}
			case each != Unknown:
				p.LocalSize = min(each, p.Size)
			case nodes == 1 || nodes == Unknown:
				p.LocalSize = p.Size
			}
		}}
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
