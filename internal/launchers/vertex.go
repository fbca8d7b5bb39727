package launchers

import "cmp"

// clusterSpec is the value of CLUSTER_SPEC and of TF_CONFIG.
type clusterSpec struct {
	Cluster map[string][]string
	Task    struct {
		Type  string
		Index int
	}
}

// vertex runs a container on each replica of worker pools. The first is the primary replica, the
// second are workers; others serve parameters or evaluate.
// https://cloud.google.com/vertex-ai/docs/training/distributed-training
func vertex() Contract {
	return Contract{Name: "Vertex AI", Machines: true, Signs: []string{"CLUSTER_SPEC"},
		More: func(v *Vars, p *Position) {
			var spec clusterSpec
			v.JSON("CLUSTER_SPEC", &spec)
			first, workers := spec.Cluster["workerpool0"], spec.Cluster["workerpool1"]
			p.Size = len(first) + len(workers)
			switch spec.Task.Type {
			case "workerpool0":
				p.Rank = spec.Task.Index
			case "workerpool1":
				p.Rank = len(first) + spec.Task.Index
			}
			v.meet(p, first)
			p.Job = cmp.Or(v.Text("CLOUD_ML_JOB_ID"), p.Addr)
		}}
}

// tensorFlow is TF_CONFIG of TFJob and others: its tasks need not be ranks.
// https://www.tensorflow.org/guide/distributed_training#TF_CONFIG
func tensorFlow() Contract {
	return Contract{Name: "TF_CONFIG", Machines: true, Signs: []string{"TF_CONFIG"},
		More: func(v *Vars, p *Position) {
			var spec clusterSpec
			v.JSON("TF_CONFIG", &spec)
			p.Size = 0
			for _, tasks := range spec.Cluster {
				p.Size += len(tasks)
			}
			p.Size = max(1, p.Size)
		}}
}
