package launchers

// jax is jax.distributed.initialize, for which Kubeflow Trainer sets these, too.
// https://docs.jax.dev/en/latest/_autosummary/jax.distributed.initialize.html
func jax() Contract {
	return Contract{Name: "JAX", Machines: true, Rank: counts{"JAX_PROCESS_ID"},
		Size: counts{"JAX_NUM_PROCESSES"}, Meet: "JAX_COORDINATOR_ADDRESS"}
}
