package launchers

// flux is flux run.
// https://flux-framework.readthedocs.io/projects/flux-core/en/latest/man7/flux-environment.html
func flux() Contract {
	return Contract{Name: "flux run", Daemons: true, Rank: counts{"FLUX_TASK_RANK"},
		Size: counts{"FLUX_JOB_SIZE"}, LocalRank: counts{"FLUX_TASK_LOCAL_ID"},
		Job: []string{"FLUX_JOB_ID"},
		More: func(v *Vars, p *Position) {
			if v.Count("FLUX_JOB_NNODES") == 1 {
				p.LocalSize = p.Size
			}
		}}
}
