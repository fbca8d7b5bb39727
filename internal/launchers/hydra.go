package launchers

// hydra is mpiexec of MPICH, Intel MPI and MVAPICH. No variable names the job.
// https://github.com/pmodels/mpich/blob/main/doc/wiki/how_to/Using_the_Hydra_Process_Manager.md
// https://www.intel.com/content/www/us/en/docs/mpi-library/developer-reference-linux/
func hydra() Contract {
	return Contract{
		Name: "mpiexec", Daemons: true, Rank: counts{"PMI_RANK"}, Size: counts{"PMI_SIZE"},
		LocalRank: counts{"MPI_LOCALRANKID"}, LocalSize: counts{"MPI_LOCALNRANKS"},
		Signs: []string{"MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
		More:  func(_ *Vars, p *Position) { p.Proxy = true }}
}

// mvapich is MVAPICH's own mpirun_rsh.
// https://mvapich.cse.ohio-state.edu/static/media/mvapich/mvapich2-userguide.html
func mvapich() Contract {
	const prefix = "MV2_COMM_WORLD_"
	return Contract{Name: "mpiexec", Daemons: true,
		Rank: counts{prefix + "RANK"}, Size: counts{prefix + "SIZE"},
		LocalRank: counts{prefix + "LOCAL_RANK"}, LocalSize: counts{prefix + "LOCAL_SIZE"},
		More: func(_ *Vars, p *Position) { p.Proxy = true }}
}

// pmi is any launcher with a PMI of version 1, for ranks of one machine.
// https://flux-framework.readthedocs.io/projects/flux-rfc/en/latest/spec_13.html
func pmi() Contract {
	return Contract{Name: "mpiexec", Rank: counts{"PMI_RANK"}, Size: counts{"PMI_SIZE"},
		More: func(_ *Vars, p *Position) {
			p.LocalRank, p.LocalSize, p.Proxy = p.Rank, p.Size, true
		}}
}
