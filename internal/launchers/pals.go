package launchers

// pals is mpiexec and aprun of Cray's Parallel Application Launch Service. The size is PMI's.
// https://cpe.ext.hpe.com/docs/latest/mpt/pals/
func pals() Contract {
	return Contract{
		Name: "PALS", Daemons: true, Rank: counts{"PALS_RANKID"}, Size: counts{"PMI_SIZE"},
		LocalRank: counts{"PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"},
		LocalSize: counts{"PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"}, Job: []string{"PALS_APID"},
		Signs: []string{"PALS_RANKID", "PALS_LOCAL_RANKID", "PALS_NODEID"}}
}
