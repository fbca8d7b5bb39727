package launchers

// skyPilot runs a command on each node.
// https://docs.skypilot.co/en/latest/running-jobs/distributed-jobs.html
func skyPilot() Contract {
	return Contract{Name: "SkyPilot", Machines: true, Rank: counts{"SKYPILOT_NODE_RANK"},
		Size: counts{"SKYPILOT_NUM_NODES"}, Meet: "SKYPILOT_NODE_IPS",
		Job: []string{"SKYPILOT_TASK_ID", "SKYPILOT_NODE_IPS"}}
}
