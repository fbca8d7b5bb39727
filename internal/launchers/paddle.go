package launchers

// paddle is paddle.distributed.launch. Nobody listens at the first endpoint but rank 0.
// https://www.paddlepaddle.org.cn/documentation/docs/en/api/paddle/distributed/launch_en.html
func paddle() Contract {
	return Contract{Name: "paddle.distributed.launch",
		Rank:      counts{"PADDLE_TRAINER_ID", "PADDLE_GLOBAL_RANK"},
		Size:      counts{"PADDLE_TRAINERS_NUM", "PADDLE_GLOBAL_SIZE"},
		LocalRank: counts{"PADDLE_RANK_IN_NODE", "PADDLE_LOCAL_RANK"},
		LocalSize: counts{"PADDLE_LOCAL_SIZE"}, Meet: "PADDLE_TRAINER_ENDPOINTS"}
}
