package launchers

import "github.com/euryale-ml/euryale/internal/env"

// ourName is the launcher that has these variables and EURYALE_JOB, too.
const ourName = "euryale run"

// torchrun sets these for each process: https://docs.pytorch.org/docs/stable/elastic/run.html.
// euryale run does, too, and Azure ML, without LOCAL_WORLD_SIZE:
// https://learn.microsoft.com/azure/machine-learning/how-to-train-distributed-gpu. PyTorchJob and
// Volcano's plugin pytorch set RANK and WORLD_SIZE for each pod; so do people.
func torchrun() Contract {
	return Contract{Name: "torchrun", Rank: counts{env.Rank}, Size: counts{env.WorldSize},
		LocalRank: counts{env.LocalRank}, LocalSize: counts{env.LocalSize},
		Signs: append(names(counts{env.Rank, env.WorldSize, env.LocalRank, env.LocalSize,
			env.GroupRank}), "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE"),
		Job: []string{"TORCHELASTIC_RUN_ID", string(env.Restarts), string(env.MasterAddr),
			string(env.MasterPort)},
		More: func(v *Vars, p *Position) {
			if v.Text(string(env.Job)) != "" {
				p.By = ourName
			}
			if v.Text(string(env.MasterPort)) == "" {
				p.Job = ""
			}
			if p.LocalSize == Unknown && Loopback(v.Text(string(env.MasterAddr))) &&
				(p.LocalRank == Unknown || p.LocalRank == p.Rank) {
				p.LocalRank, p.LocalSize = p.Rank, p.Size
			}
		}}
}
