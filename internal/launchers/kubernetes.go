package launchers

import "github.com/euryale-ml/euryale/internal/env"

// indexedJob is an Indexed Job of Kubernetes, alone or in a JobSet. It numbers the pods, and the
// manifest says the rest.
// https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode
// https://jobset.sigs.k8s.io/docs/overview/
func indexedJob() Contract {
	return Contract{Name: "Kubernetes", Machines: true, Rank: counts{"JOB_COMPLETION_INDEX"},
		Size: counts{env.WorldSize}, Job: []string{string(env.MasterAddr), string(env.MasterPort)},
		Signs: []string{"JOB_COMPLETION_INDEX"},
		Advice: "in the manifest set WORLD_SIZE to the number of pods, and MASTER_ADDR and " +
			"MASTER_PORT to the name of the pod of index 0 in its headless Service, and to a port"}
}
