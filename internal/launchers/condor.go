package launchers

// condor is the parallel universe of HTCondor.
// https://htcondor.readthedocs.io/en/latest/users-manual/parallel-applications.html
func condor() Contract {
	return Contract{Name: "HTCondor", Rank: counts{"_CONDOR_PROCNO"},
		Size: counts{"_CONDOR_NPROCS"}}
}
