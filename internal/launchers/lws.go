package launchers

// leaderWorkerSet is a group of pods of Kubernetes.
// https://lws.sigs.k8s.io/docs/reference/labels-annotations-and-environment-variables/
func leaderWorkerSet() Contract {
	return Contract{Name: "LeaderWorkerSet", Machines: true, Rank: counts{"LWS_WORKER_INDEX"},
		Size: counts{"LWS_GROUP_SIZE"}, Meet: "LWS_LEADER_ADDRESS"}
}
