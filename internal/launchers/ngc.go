package launchers

// ngc is a multi-node job of NVIDIA's Base Command.
// https://docs.nvidia.com/base-command-platform/user-guide/latest/index.html
func ngc() Contract {
	return Contract{Name: "NGC", Machines: true, Rank: counts{"NGC_ARRAY_INDEX"},
		Size: counts{"NGC_ARRAY_SIZE"}, Job: []string{"NGC_JOB_ID"}}
}
