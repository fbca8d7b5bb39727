package launchers

// jsrun starts ranks in jobs of LSF, whose own variables (LSB_*) name an allocation, in which one
// script starts programs: they are no signs.
// https://www.ibm.com/docs/en/spectrum-lsf/10.1.0?topic=variables-environment-set-job-execution
func jsrun() Contract {
	return Contract{
		Name: "jsrun", Rank: counts{"JSM_NAMESPACE_RANK"}, Size: counts{"JSM_NAMESPACE_SIZE"},
		LocalRank: counts{"JSM_NAMESPACE_LOCAL_RANK"},
		LocalSize: counts{"JSM_NAMESPACE_LOCAL_SIZE"},
		Job:       []string{"LSB_JOBID", "JSM_NAMESPACE_ID"}}
}
