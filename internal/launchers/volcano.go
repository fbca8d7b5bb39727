package launchers

// volcano is a job of Volcano with the plugins env and svc, of tasks of one name: those of several
// are numbered apart.
// https://github.com/volcano-sh/volcano/blob/master/docs/user-guide/how_to_use_svc_plugin.md
func volcano() Contract {
	return Contract{Name: "Volcano", Machines: true, Rank: counts{"VC_TASK_INDEX", "VK_TASK_INDEX"},
		Meet:  "VC_*_HOSTS",
		Signs: []string{"VC_TASK_INDEX", "VK_TASK_INDEX", "VC_*_NUM", "VC_*_HOSTS"},
		More: func(v *Vars, p *Position) {
			if p.Addr != "" {
				p.Size = v.Count("VC_*_NUM")
			}
		},
		Advice: "use Volcano's plugins env and svc and tasks of one name, or its plugin pytorch"}
}
