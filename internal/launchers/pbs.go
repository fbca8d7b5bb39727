package launchers

// pbs is pbsdsh, which says no size. A batch script is task 1 of node 0, and starts programs
// itself; the variables of a job, such as PBS_NODEFILE, are no signs.
// https://help.altair.com/2024.1.0/PBS%20Professional/PBSUserGuide2024.1.pdf
func pbs() Contract {
	return Contract{Name: "pbsdsh", Signs: []string{"PBS_TASKNUM", "PBS_NODENUM"},
		More: func(v *Vars, p *Position) {
			p.Script = v.Count("PBS_TASKNUM") <= 1 && v.Count("PBS_NODENUM") <= 0
		},
		Advice: "start the program with mpiexec, or the job with euryale run -H"}
}
