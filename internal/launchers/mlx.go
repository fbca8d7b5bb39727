package launchers

// mlx is mlx.launch. Only with NCCL it says a size and an address.
// https://ml-explore.github.io/mlx/build/html/usage/launching_distributed.html
func mlx() Contract {
	return Contract{Name: "mlx.launch", Rank: counts{"MLX_RANK"}, Size: counts{"MLX_WORLD_SIZE"},
		LocalRank: counts{"MLX_LOCAL_RANK"}, LocalSize: counts{"MLX_LOCAL_WORLD_SIZE"},
		Meet: "NCCL_HOST_IP", Job: []string{"NCCL_HOST_IP", "NCCL_PORT"},
		Signs: []string{"MLX_RANK", "MLX_WORLD_SIZE", "MLX_HOSTFILE", "MLX_IBV_DEVICES",
			"MLX_JACCL_COORDINATOR"}}
}
