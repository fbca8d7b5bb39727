package launchers

// openMPI is mpirun of versions 4 and 5, also as started by the MPI Operator. None of its variables
// numbers the machines: OMPI_COMM_WORLD_NODE_RANK counts within one.
// https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html
func openMPI() Contract {
	const prefix = "OMPI_COMM_WORLD_"
	return Contract{
		Name: "mpirun", Daemons: true, Rank: counts{prefix + "RANK"}, Size: counts{prefix + "SIZE"},
		LocalRank: counts{prefix + "LOCAL_RANK"}, LocalSize: counts{prefix + "LOCAL_SIZE"},
		More: func(v *Vars, p *Position) {
			p.Job = v.Text("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMIX_ID")
			// The name space may come again in a later run; mpirun's address does not.
			if uri := v.Text("OMPI_MCA_orte_hnp_uri"); uri != "" {
				p.Job += "-" + uri
			}
		}}
}

// pmix is any launcher of PMIx, such as prterun: it says no size.
// https://openpmix.github.io/
func pmix() Contract { return Contract{Name: "PMIx", Rank: counts{"PMIX_RANK"}} }
