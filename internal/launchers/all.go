package launchers

import "github.com/euryale-ml/euryale/internal/env"

// All returns the contracts. Those of launchers that others start come first, and those that
// number machines last.
func All() []Contract {
	return []Contract{
		torchrun(),
		openMPI(),
		// jsrun starts ranks in jobs of LSF, whose own variables (LSB_*) name an allocation, in
		// which one script starts programs: they are no signs.
		// https://www.ibm.com/docs/en/spectrum-lsf/10.1.0?topic=variables-environment-set-job-execution
		{Name: "jsrun", Rank: counts{"JSM_NAMESPACE_RANK"}, Size: counts{"JSM_NAMESPACE_SIZE"},
			LocalRank: counts{"JSM_NAMESPACE_LOCAL_RANK"},
			LocalSize: counts{"JSM_NAMESPACE_LOCAL_SIZE"},
			Job:       []string{"LSB_JOBID", "JSM_NAMESPACE_ID"}},
		// horovodrun with Gloo, whose server is not on the machine of rank 0.
		// https://horovod.readthedocs.io/en/stable/api.html
		{Name: "horovodrun", Rank: counts{"HOROVOD_RANK"}, Size: counts{"HOROVOD_SIZE"},
			LocalRank: counts{"HOROVOD_LOCAL_RANK"}, LocalSize: counts{"HOROVOD_LOCAL_SIZE"},
			Job: []string{"HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"}},
		hydra(),
		mvapich(),
		// mlx.launch. Only with NCCL it says a size and an address.
		// https://ml-explore.github.io/mlx/build/html/usage/launching_distributed.html
		{Name: "mlx.launch", Rank: counts{"MLX_RANK"}, Size: counts{"MLX_WORLD_SIZE"},
			LocalRank: counts{"MLX_LOCAL_RANK"}, LocalSize: counts{"MLX_LOCAL_WORLD_SIZE"},
			Meet: "NCCL_HOST_IP", Job: []string{"NCCL_HOST_IP", "NCCL_PORT"},
			Signs: []string{"MLX_RANK", "MLX_WORLD_SIZE", "MLX_HOSTFILE", "MLX_IBV_DEVICES",
				"MLX_JACCL_COORDINATOR"}},
		// paddle.distributed.launch. Nobody listens at the first endpoint but rank 0.
		// https://www.paddlepaddle.org.cn/documentation/docs/en/api/paddle/distributed/launch_en.html
		{Name: "paddle.distributed.launch",
			Rank:      counts{"PADDLE_TRAINER_ID", "PADDLE_GLOBAL_RANK"},
			Size:      counts{"PADDLE_TRAINERS_NUM", "PADDLE_GLOBAL_SIZE"},
			LocalRank: counts{"PADDLE_RANK_IN_NODE", "PADDLE_LOCAL_RANK"},
			LocalSize: counts{"PADDLE_LOCAL_SIZE"}, Meet: "PADDLE_TRAINER_ENDPOINTS"},
		// mpiexec and aprun of Cray's Parallel Application Launch Service. The size is PMI's.
		// https://cpe.ext.hpe.com/docs/latest/mpt/pals/
		{Name: "PALS", Daemons: true, Rank: counts{"PALS_RANKID"}, Size: counts{"PMI_SIZE"},
			LocalRank: counts{"PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"},
			LocalSize: counts{"PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"}, Job: []string{"PALS_APID"},
			Signs: []string{"PALS_RANKID", "PALS_LOCAL_RANKID", "PALS_NODEID"}},
		flux(),
		slurm(),
		pmi(),
		pmix(),
		// The parallel universe of HTCondor.
		// https://htcondor.readthedocs.io/en/latest/users-manual/parallel-applications.html
		{Name: "HTCondor", Rank: counts{"_CONDOR_PROCNO"},
			Size: counts{"_CONDOR_NPROCS"}},
		// pbsdsh, which says no size. A batch script is task 1 of node 0, and starts programs
		// itself; the variables of a job, such as PBS_NODEFILE, are no signs.
		// https://help.altair.com/2024.1.0/PBS%20Professional/PBSUserGuide2024.1.pdf
		{Name: "pbsdsh", Signs: []string{"PBS_TASKNUM", "PBS_NODENUM"},
			More: func(v *Vars, p *Position) {
				p.Script = v.Count("PBS_TASKNUM") <= 1 && v.Count("PBS_NODENUM") <= 0
			},
			Advice: "start the program with mpiexec, or the job with euryale run -H"},
		// The tracker of MXNet and XGBoost. Servers and schedulers have its variables, too, and the
		// tracker listens at the address that it gives.
		// https://xgboost.readthedocs.io/en/stable/tutorials/kubernetes.html
		{Name: "the DMLC tracker", Size: counts{"DMLC_NUM_WORKER"},
			Signs: []string{"DMLC_TASK_ID", "DMLC_WORKER_ID", "DMLC_NUM_WORKER", "DMLC_TRACKER_URI",
				"DMLC_PS_ROOT_URI"}},
		kubeflow(),
		// jax.distributed.initialize, for which Kubeflow Trainer sets these, too.
		// https://docs.jax.dev/en/latest/_autosummary/jax.distributed.initialize.html
		{Name: "JAX", Machines: true, Rank: counts{"JAX_PROCESS_ID"},
			Size: counts{"JAX_NUM_PROCESSES"}, Meet: "JAX_COORDINATOR_ADDRESS"},
		// A group of pods of Kubernetes.
		// https://lws.sigs.k8s.io/docs/reference/labels-annotations-and-environment-variables/
		{Name: "LeaderWorkerSet", Machines: true, Rank: counts{"LWS_WORKER_INDEX"},
			Size: counts{"LWS_GROUP_SIZE"}, Meet: "LWS_LEADER_ADDRESS"},
		// A job of Volcano with the plugins env and svc, of tasks of one name: those of several are
		// numbered apart.
		// https://github.com/volcano-sh/volcano/blob/master/docs/user-guide/how_to_use_svc_plugin.md
		{Name: "Volcano", Machines: true, Rank: counts{"VC_TASK_INDEX", "VK_TASK_INDEX"},
			Meet:  "VC_*_HOSTS",
			Signs: []string{"VC_TASK_INDEX", "VK_TASK_INDEX", "VC_*_NUM", "VC_*_HOSTS"},
			More: func(v *Vars, p *Position) {
				if p.Addr != "" {
					p.Size = v.Count("VC_*_NUM")
				}
			},
			Advice: "use Volcano's plugins env and svc and tasks of one name, or its plugin " +
				"pytorch"},
		// SkyPilot runs a command on each node.
		// https://docs.skypilot.co/en/latest/running-jobs/distributed-jobs.html
		{Name: "SkyPilot", Machines: true, Rank: counts{"SKYPILOT_NODE_RANK"},
			Size: counts{"SKYPILOT_NUM_NODES"}, Meet: "SKYPILOT_NODE_IPS",
			Job: []string{"SKYPILOT_TASK_ID", "SKYPILOT_NODE_IPS"}},
		sageMaker(),
		vertex(),
		tensorFlow(),
		awsBatch(),
		// A multi-node job of NVIDIA's Base Command.
		// https://docs.nvidia.com/base-command-platform/user-guide/latest/index.html
		{Name: "NGC", Machines: true, Rank: counts{"NGC_ARRAY_INDEX"},
			Size: counts{"NGC_ARRAY_SIZE"}, Job: []string{"NGC_JOB_ID"}},
		nodes(),
		// An Indexed Job of Kubernetes, alone or in a JobSet. It numbers the pods, and the manifest
		// says the rest.
		// https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode
		// https://jobset.sigs.k8s.io/docs/overview/
		{Name: "Kubernetes", Machines: true, Rank: counts{"JOB_COMPLETION_INDEX"},
			Size:  counts{env.WorldSize},
			Job:   []string{string(env.MasterAddr), string(env.MasterPort)},
			Signs: []string{"JOB_COMPLETION_INDEX"},
			Advice: "in the manifest set WORLD_SIZE to the number of pods, and MASTER_ADDR and " +
				"MASTER_PORT to the name of the pod of index 0 in its headless Service, and to a " +
				"port"},
	}
}
