package launchers

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/euryale-ml/euryale/internal/env"
)

// kubeflow is Kubeflow Trainer, and PyTorchJob before it: it starts a command on each node, with
// the flags of torchrun as variables.
// https://github.com/kubeflow/trainer/tree/master/pkg/runtime/framework/plugins/torch
func kubeflow() Contract { return agents("Kubeflow Trainer", "PET_") }

// nodes is NNODES and NODE_RANK, which people and some clouds set for torchrun.
// https://docs.pytorch.org/docs/stable/elastic/run.html
func nodes() Contract { return agents("NNODES and NODE_RANK", "") }

func agents(name, prefix string) Contract {
	nnodes, rank := prefix+"NNODES", env.Count(prefix+"NODE_RANK")
	each := prefix + "NPROC_PER_NODE"
	return Contract{Name: name, Machines: true, Rank: counts{rank}, Meet: prefix + "MASTER_ADDR",
		Job:   []string{prefix + "MASTER_ADDR", prefix + "MASTER_PORT"},
		Signs: []string{nnodes, string(rank)},
		More: func(v *Vars, p *Position) {
			least, most, isRange := strings.Cut(v.Text(nnodes), ":")
			if isRange && least != most {
				v.fail(fmt.Errorf("%s=%s:%s: euryale run takes one number", nnodes, least, most))
			} else if least != "" {
				p.Size = v.count(nnodes, least)
			}
			if n, err := strconv.Atoi(v.Text(each)); err == nil { // it may be auto, cpu or gpu
				p.PerMachine = n
			}
			p.Port = max(0, v.Count(env.Count(prefix+"MASTER_PORT")))
		}}
}
