package launchers

// horovod is horovodrun with Gloo, whose server is not on the machine of rank 0.
// https://horovod.readthedocs.io/en/stable/api.html
func horovod() Contract {
	return Contract{Name: "horovodrun", Rank: counts{"HOROVOD_RANK"}, Size: counts{"HOROVOD_SIZE"},
		LocalRank: counts{"HOROVOD_LOCAL_RANK"}, LocalSize: counts{"HOROVOD_LOCAL_SIZE"},
		Job: []string{"HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"}}
}
